"""Who shares a replica of the trainer's states with whom."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from libra_cli.config.recipe import Recipe
from libra_cli.config.training import TrainingSpec
from libra_cli.core.costs.architecture import PUBLISHED, published
from libra_cli.core.costs.mixture_transformer import MixtureTransformer
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.launch.process import HostFacts, ProcessSpec, worker_ports
from libra_cli.core.launch.sharding import RankConditions, dp_shard_size
from libra_cli.core.launch.trainer_backend import (
    TrainerLaunch,
    WorkerLaunch,
    trainer_processes,
    worker_process,
)
from libra_cli.core.types import Pool, Slot


def shards(ranks: dict[str, int], *, host_fits: bool = True, wanted: int | None = None) -> int:
    return dp_shard_size(TrainingSpec(dp_shard_size=wanted), ranks, host_fits=host_fits)


def test_each_of_several_even_hosts_that_hold_a_replica_has_one():
    assert shards({"a": 8, "b": 8}) == 8
    assert shards({"a": 8, "b": 8, "c": 8}) == 8


def test_ranks_are_one_replica_on_one_host_on_uneven_ones_and_where_a_host_does_not_hold_it():
    assert shards({"a": 8}) == 8
    assert shards({"a": 8, "b": 4}) == 12
    assert shards({"a": 1, "b": 1}) == 2
    assert shards({"a": 8, "b": 8}, host_fits=False) == 16


@pytest.mark.parametrize(
    ("ranks", "wanted", "found"),
    [
        ({"a": 8, "b": 8}, 16, 16),
        ({"a": 8, "b": 8}, 4, 4),
        ({"a": 8, "b": 8, "c": 8, "d": 8}, 16, 16),
        ({"a": 6, "b": 6}, 4, 12),  # a replica would lie across two hosts
        ({"a": 8, "b": 4}, 4, 12),
        ({"a": 8, "b": 8, "c": 8}, 16, 24),
    ],
)
def test_what_a_recipe_says_holds_where_it_fits_the_hosts(
    ranks: dict[str, int], wanted: int, found: int
):
    assert shards(ranks, host_fits=False, wanted=wanted) == found


def conditions(tokens: int = 131072, cp_size: int | None = None) -> RankConditions:
    return RankConditions(tokens, "full", 2, "adamw", cp_size=cp_size)


SMALL = PUBLISHED["Qwen3-8B"]


@pytest.mark.parametrize(
    ("wanted", "ranks", "found"), [(4, 8, 4), (8, 8, 8), (8, 4, 4), (4, 6, 2), (3, 8, 1)]
)
def test_as_many_ranks_share_a_pass_as_divide_both_the_recipe_s_number_and_a_replica(
    wanted: int, ranks: int, found: int
):
    assert conditions(cp_size=wanted).sharing(SMALL, ranks, ranks, 80.0) == found


def test_as_few_ranks_share_a_pass_as_memory_allows_and_the_heads_divide():
    longest = conditions().longest(SMALL, 8, 1, 80.0)
    for tokens, found in ((longest, 1), (longest + 1, 2), (10**8, 8)):
        assert conditions(tokens).sharing(SMALL, 8, 8, 80.0) == found
    assert conditions().sharing(SMALL, 8, 8, 0.0) == 1, "nobody says how much memory there is"
    assert conditions().sharing(None, 8, 8, 80.0) == 1
    assert conditions().degrees(SMALL, 12) == [1, 2, 4]  # of 32 heads


def test_ranks_share_no_pass_of_a_mixture_whose_routers_look_at_whole_sequences():
    mixture = published("Qwen3-30B-A3B")
    assert isinstance(mixture, MixtureTransformer)
    balanced = replace(mixture, balanced=True)
    assert len(conditions().degrees(mixture, 8)) > 1
    assert conditions().degrees(balanced, 8) == [1]
    assert conditions(10**8).sharing(mixture, 8, 8, 80.0) > 1
    assert conditions(10**8).sharing(balanced, 8, 8, 80.0) == 1


@pytest.mark.parametrize("cp_size", [None, 1, 2])
def test_ranks_may_share_passes_and_part_experts_and_replay_routes(cp_size: int | None):
    recipe = Recipe.model_validate(
        {
            "nodes": [{"host": "local", "slots": 2}],
            "model": {"build": {"experts": 8}},
            "environment": {"name": "pointer-chase"},
            "training": {"ep_size": 4, "cp_size": cp_size, "rollout_routes": True},
        }
    )
    found = RankConditions.of(recipe, on_gpu=True, dtype="bfloat16", ranks=8)
    assert found.cp_size == cp_size
    mixture = published("Qwen3-30B-A3B")
    assert found.parted(mixture, 8) == 4
    assert found.parted(SMALL, 8) == 1
    assert found.sharing(mixture, 8, 8, 80.0) == (cp_size or 1)


def test_a_trajectory_is_as_long_as_the_ranks_that_share_it_have_memory_for():
    by_degree = [conditions().longest(SMALL, 8, sharing, 80.0) for sharing in (1, 2, 4, 8)]
    for fewer, more in itertools.pairwise(by_degree):
        assert more == pytest.approx(2 * fewer, rel=0.001)
    assert conditions().longest(SMALL, 1, 1, 80.0) == 0


@pytest.mark.parametrize(
    ("training", "on_gpu", "may"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"activation_checkpointing": "full"}, True, False),
        ({"activation_offload": True}, True, False),
        ({"tiled_mlp": True}, True, False),
    ],
)
def test_only_auto_on_gpus_may_keep_more_where_memory_suffices(
    training: dict[str, Any], on_gpu: bool, may: bool
):
    recipe = Recipe.model_validate(RECIPE | {"training": {"micro_batch_tokens": 16384} | training})
    found = RankConditions.of(recipe, on_gpu=on_gpu, dtype="bfloat16", ranks=1)
    assert found.choice == ("full" if on_gpu else "none")
    for size, choice in ((100.0, "selective" if may else found.choice), (80.0, found.choice)):
        # 8B on eight ranks with 16,384 tokens takes 36 GiB, or with matrix products kept 82.
        assert found.settled(SMALL, 8, 1, size).choice == choice
    assert found.settled(None, 8, 1, 80.0) == found
    assert found.settled(SMALL, 8, 1, 0.0) == found, "nobody says how much memory there is"


RECIPE: dict[str, Any] = {
    "nodes": [
        {"host": "a", "gpus": 8, "pool": "train"},
        {"host": "b", "gpus": 8, "pool": "train"},
        {"host": "c", "gpus": 1, "pool": "rollout"},
    ],
    "model": {"path": "/models/Qwen3-14B", "max_len": 16384},
    "training": {"micro_batch_tokens": 32768},
}


def started(recipe: dict[str, Any], gpu_gib: float, model: str = "14B") -> list[ProcessSpec]:
    made = Recipe.model_validate(recipe)
    slots = {slot.id: slot for slot in slots_of(made)}
    facts = {
        node.name: HostFacts(node.name, "py", "/w", "/w/r", "/shm", node.name, gpu_gib=gpu_gib)
        for node in made.nodes
    }
    launch = TrainerLaunch(
        train=tuple(slots[slot] for slot in initial_plan(made).train),
        facts=facts,
        run_id="r",
        rendezvous_port=21001,
        model_dirs=dict.fromkeys(facts, "/models/m"),
        trainer_incarnation=1,
        shape=PUBLISHED[f"Qwen3-{model}"],
    )
    return list(trainer_processes(made, launch))


@pytest.mark.parametrize(
    ("model", "gpu_gib", "size"), [("14B", 79.6, 8), ("14B", 47.5, None), ("32B", 79.6, None)]
)
def test_a_host_s_ranks_are_a_replica_where_the_memory_law_says_they_hold_it(
    model: str, gpu_gib: float, size: int | None
):
    configs = [json.loads(spec.files["trainer.json"]) for spec in started(RECIPE, gpu_gib, model)]
    assert [config["dp_shard_size"] for config in configs] == [size, size]


def test_ranks_that_share_a_pass_are_of_one_replica_and_hold_what_is_theirs_of_it():
    model = {"path": "/models/Qwen3-14B", "max_len": 131072}
    long = RECIPE | {"model": model}
    found = []
    for gpu_gib, cp_size in ((0.0, None), (0.0, 8), (79.6, None), (79.6, 16), (47.5, None)):
        training = {"micro_batch_tokens": 131072, "cp_size": cp_size}
        config = json.loads(
            started(long | {"training": training}, gpu_gib)[0].files["trainer.json"]
        )
        found.append((config["dp_shard_size"], config["cp_size"]))
    assert found == [(None, 1), (None, 8), (8, 4), (8, 8), (None, 8)]


@pytest.mark.parametrize(("max_len", "sharing"), [(16_384, 1), (32_768, 2)])
def test_a_gradient_worker_shares_passes_by_what_it_holds_and_it_holds_no_moments(
    max_len: int, sharing: int
):
    """A rank of the trainer of one host's size would need all eight for Qwen3-32B at any length."""
    training = {"micro_batch_tokens": max_len}
    model = {"path": "/m", "max_len": max_len}
    recipe = Recipe.model_validate(RECIPE | {"model": model, "training": training})
    slot, shape = Slot("b/0", "b", tuple(range(8)), Pool.TRAIN), PUBLISHED["Qwen3-32B"]
    facts = HostFacts("b", "py", "/w", "/w/r", "/shm", "b", gpu_gib=79.6)
    ports = dict.fromkeys(worker_ports(slot), 21001)
    launch = WorkerLaunch(slot, facts, "r", 1, ports, "/models/m", shape)
    files = worker_process(recipe, launch).files
    (config,) = (text for name, text in files.items() if name.endswith(".json"))
    assert json.loads(config)["cp_size"] == sharing
    trainer = RankConditions.of(recipe, on_gpu=True, dtype="bfloat16", ranks=16)
    assert trainer.sharing(shape, 8, 8, 79.6) == 8


def test_uneven_hosts_form_one_world_with_the_launcher_that_can_start_it():
    uneven = RECIPE | {"nodes": [RECIPE["nodes"][0] | {"gpus": 4}, *RECIPE["nodes"][1:]]}
    first, second = started(uneven, 79.6)
    assert "--nproc-per-node 4 --master-addr a" in " ".join(first.argv)
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 8" in " ".join(second.argv)
    assert first.env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    config = json.loads(first.files["trainer.json"])
    assert (config["world_size"], config["dp_shard_size"]) == (12, None)


def test_a_replica_on_each_rank_and_a_number_of_ranks_that_share_one_contradict_each_other():
    training = RECIPE["training"] | {"sharding": "ddp", "dp_shard_size": 8}
    with pytest.raises(ValueError, match=r"training\.sharding is 'ddp': each rank has a replica"):
        Recipe.model_validate(RECIPE | {"training": training})
