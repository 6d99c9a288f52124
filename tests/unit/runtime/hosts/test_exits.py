"""What is told of a process that has failed."""

from __future__ import annotations

import pytest

from libra_cli.runtime.hosts.agent_messages import Exited
from libra_cli.runtime.hosts.exits import how_it_ended


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("", "it wrote nothing"),
        ("a\nb\n\n", "b"),
        ("Traceback\nValueError: no\nmore\n", "ValueError: no"),
        (
            "torch.OutOfMemoryError: CUDA\nsubprocess.CalledProcessError: Command\n",
            "torch.OutOfMemoryError: CUDA",
        ),
        (
            (
                '[rank0]:   File "core.py", line 157\n'
                "[rank0]: ModuleNotFoundError: No module named 'torchvision'\n"
                "[rank0]:[W1126 04:30:26.644 ProcessGroupNCCL.cpp:1624] Warning: WARNING: "
                "destroy_process_group() was not called before program exit\n"
            ),
            "ModuleNotFoundError: No module named 'torchvision'",
        ),
        (
            (
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
                "  Value error, max_model_len (9) is greater than 8\n"
                "    For further information visit https://errors.pydantic.dev\n"
            ),
            (
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
                "Value error, max_model_len (9) is greater than 8"
            ),
        ),
    ],
)
def test_a_process_that_failed_is_told_with_its_last_error(tail, reason):
    event = Exited("n", "server-0", 1, 1, tail, requested=False)
    assert how_it_ended(event) == f"ended with exit code 1: {reason}"


def test_a_process_that_was_killed_is_not_blamed_on_its_last_line():
    event = Exited("n", "server-0", 1, -9, "all is well", requested=False)
    assert how_it_ended(event) == "was ended by signal 9"
