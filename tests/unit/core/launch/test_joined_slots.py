"""A server on joined slots has what its parts have, and takes nothing from anybody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.joined_slots import slot_named
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.launch.process import HostFacts, ProcessSpec, process_of
from libra_cli.core.launch.rollout_backend import server_process
from libra_cli.core.types import Bucket

FACTS = HostFacts("n", "py", "/w", "/w/runs/r1/n", "/dev/shm/libra", "10.0.0.1", cpus=16)


def recipe(gpus: int) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "r"},
            "nodes": [
                {"host": "n", "slots": 4, "gpus": gpus, "pool": "rollout"},
                {"host": "t", "gpus": gpus, "pool": "train"},
            ],
            "model": {"path": "/models/m"},
            "environment": {"name": "pointer-chase"},
            "rollout": {"buckets": [{"name": "all", "tensor_parallel": max(1, gpus // 4)}]},
        }
    )


def server(gpus: int, name: str, degree: int) -> ProcessSpec:
    made = recipe(gpus)
    slot = slot_named(name, {slot.id: slot for slot in slots_of(made)})
    bucket = Bucket("large", degree, 16, 4096)
    return server_process(made, slot, bucket, FACTS, model_dir="/models/m")


def flags(spec: ProcessSpec) -> dict[str, Any]:
    return dict(zip(spec.argv, spec.argv[1:], strict=False))


@pytest.mark.parametrize(("name", "visible"), [("n/0+1", "0,1,2,3"), ("n/1+2+3", "2,3,4,5,6,7")])
def test_on_gpus_it_sees_those_of_its_parts(name, visible):
    spec = server(8, name, len(visible.split(",")))
    assert spec.env["CUDA_VISIBLE_DEVICES"] == visible
    assert flags(spec)["--tensor-parallel-size"] == str(len(visible.split(",")))


def test_gpus_are_called_as_the_host_calls_them_or_else_as_the_recipe_does():
    made = recipe(8)
    (first, *_) = slots_of(made)
    bucket, others = Bucket("small", 2, 16, 4096), made.nodes[1:]
    seen = replace(FACTS, devices=tuple(f"MIG-{number}" for number in range(8)))
    spec = server_process(made, first, bucket, seen, model_dir="/models/m")
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "MIG-0,MIG-1"
    listed = made.nodes[0].model_copy(update={"gpu_ids": tuple("76543210")})
    told = made.model_copy(update={"nodes": (listed, *others)})
    spec = server_process(told, first, bucket, FACTS, model_dir="/models/m")
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "7,6"


def test_without_gpus_its_ranks_have_the_cores_and_the_cache_of_a_part_each():
    one, joined = server(0, "n/0", 1), server(0, "n/0+1", 2)
    assert flags(joined)["--tensor-parallel-size"] == "2"
    assert one.env["OMP_NUM_THREADS"] == joined.env["OMP_NUM_THREADS"] == "4"
    assert one.env["VLLM_CPU_KVCACHE_SPACE"] == joined.env["VLLM_CPU_KVCACHE_SPACE"]


def test_it_has_a_name_and_a_socket_of_its_own_and_the_seed_of_its_first_part():
    made = recipe(0)
    slots = {slot.id: slot for slot in slots_of(made)}
    joined = slot_named("n/1+2", slots)
    assert process_of("n/1+2") == "server-1-2"
    assert flags(server(0, joined.id, 2))["--socket"].endswith("/sockets/server-1-2.sock")
    assert flags(server(0, "n/1+2", 2))["--seed"] == flags(server(0, "n/1", 1))["--seed"]
