"""vLLM as it is on GPUs, two steps in flight, under libra's engine; its workers are stubs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the [cpu] extra"),
]


def test_no_token_is_lost_or_doubled_with_two_steps_in_flight(tmp_path):
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            told, _ = process.communicate(timeout=240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0
    cases = [json.loads(line) for line in told.splitlines()]
    engines = {tuple(case["case"]): case["engine"] for case in cases}
    ahead = ", async scheduling, no CUDA graphs"
    assert engines == {
        ("fast", False, 1): f"runner V1{ahead}",
        ("fast", False, 2): f"runner V1{ahead}",
        ("fast", True, 1): f"runner V2{ahead}",
        ("fast", True, 2): f"runner V2{ahead}",
        ("safe", False, 1): "runner V1, no async scheduling, no CUDA graphs",
    }
    for case in cases:
        assert not case["faults"], case["faults"][:5]
        # What could go wrong has happened, and often.
        assert case["turns"] == 200
        least = {"loads": 15, "aborts": 15, "preemptions": 15, "changed": 40, "prefix_hits": 1000}
        assert all(case[kind] >= number for kind, number in least.items()), case
