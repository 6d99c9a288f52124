"""What a host says of itself, against what the recipe wants of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.config.recipe import Recipe
from libra_cli.core.cluster.placement import initial_plan
from libra_cli.runtime.hosts.agent_messages import Exited, Gpu, GpuHolder, NodeFacts
from libra_cli.runtime.hosts.cluster import how_it_ended
from libra_cli.runtime.hosts.preflight import problems

NOW = 1_790_000_000.0
GOOD = NodeFacts(
    python="3.12.3",
    hostname="gpu-01",
    user="me",
    cpus=16,
    mem_total=2**37,
    mem_free=2**36,
    disk_free=2**40,
    shm_free=2**36,
    gpus=(Gpu(0, "A100", 2**36, 2**36, ()), Gpu(1, "A100", 2**36, 2**36, ())),
    interface="eth0",
    address="10.0.0.1",
    clock=NOW,
    packages=("vllm", "torch", "transformers", "accelerate", "msgpack", "safetensors"),
    paths=("/models/m",),
)


def found(**changes) -> list[str]:
    recipe = Recipe.model_validate(
        {
            "nodes": [{"host": "gpu-01", "gpus": 2, "slots": 2, "pool": ["rollout", "train"]}],
            "model": {"path": "/models/m"},
            "environment": {"name": "calculator"},
        }
    )
    seen = replace(GOOD, **changes)
    return problems(recipe, initial_plan(recipe), recipe.nodes[0], seen, now=NOW)


def test_a_good_host_has_no_problem():
    assert found() == []


def test_missing_packages_come_with_the_command_that_installs_them():
    (problem,) = found(packages=("torch", "transformers", "msgpack", "safetensors"))
    assert "accelerate, vllm" in problem
    assert "pip install 'libra-rl[gpu]'" in problem


def test_a_gpu_in_use_is_named_with_its_holder():
    holder = GpuHolder(4711, "ann", "python train.py")
    held = (Gpu(0, "A100", 2**36, 0, (holder,)), GOOD.gpus[1])
    (problem,) = found(gpus=held)
    assert "GPU 0" in problem
    assert "python train.py (pid 4711, ann)" in problem


def test_fewer_gpus_than_promised_give_both_numbers():
    (problem,) = found(gpus=GOOD.gpus[:1])
    assert "wants 2 GPUs" in problem
    assert "shows 1" in problem


def test_a_model_that_is_not_there_is_named():
    (problem,) = found(paths=())
    assert "/models/m" in problem


def test_little_shared_memory_and_a_wrong_clock_are_both_told():
    assert len(found(shm_free=2**20, clock=NOW + 60)) == 2


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
    ],
)
def test_a_process_that_failed_is_told_with_its_last_error(tail, reason):
    event = Exited("n", "server-0", 1, 1, tail, requested=False)
    assert how_it_ended(event) == f"ended with exit code 1: {reason}"


def test_a_process_that_was_killed_is_not_blamed_on_its_last_line():
    event = Exited("n", "server-0", 1, -9, "all is well", requested=False)
    assert how_it_ended(event) == "was ended by signal 9"
