"""A server and a rank on one GPU, or in the memory of a host without GPUs: who gets what of it."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from libra_cli.app.dry_run import plan_of
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.costs.architecture import PUBLISHED
from libra_cli.core.costs.memory import GIB, served_bytes
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.launch.process import HostFacts
from libra_cli.core.launch.rollout_backend import server_process
from libra_cli.core.types import Bucket, Pool
from tests.world import Faults, World
from tests.world import recipe as small

SMALL, LARGER = PUBLISHED["Qwen3-0.6B"], PUBLISHED["Qwen3-1.7B"]
SHARED = {"gpus": 1, "share": {"rollout": 0.3, "train": 0.6}}
RECIPES = Path(__file__).parents[4] / "recipes"


def recipe(*, node: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    nodes = [{"host": "local", **SHARED, **(node or {})}]
    model = {"path": "/models/m", "max_len": 4096}
    return Recipe.model_validate({"nodes": nodes, "model": model, **sections})


def facts(**known: Any) -> HostFacts:
    return HostFacts("local", "py", "/w", "/w/runs/r/local", "/shm", "127.0.0.1", cpus=8, **known)


def server(made: Recipe, there: HostFacts, shape: Any = SMALL) -> dict[str, str]:
    slot = slots_of(made)[0]
    bucket = Bucket("all", 1, 8, 512)
    spec = server_process(made, slot, bucket, there, model_dir="/m", shape=shape)
    return dict(spec.env) | dict(pairwise(spec.argv))


@pytest.mark.parametrize("pool", [None, ["rollout", "train"], ["train", "rollout"]])
def test_two_slots_have_the_one_gpu_and_stay_what_they_are(pool: list[str] | None):
    made = recipe(node={"pool": pool})
    serves, trains = sorted(slots_of(made), key=lambda slot: slot.pool)
    assert (serves.pool, trains.pool) == (Pool.ROLLOUT, Pool.TRAIN)
    assert serves.gpus == trains.gpus == (0,)
    assert not serves.overlaps(trains)
    assert not made.has_open_nodes
    plan = initial_plan(made)
    assert ([slot for slot, _ in plan.servers], plan.train) == ([serves.id], (trains.id,))


def test_a_server_has_its_share_and_its_cache_is_what_that_leaves():
    given = server(recipe(), facts(gpu_gib=24.0))
    assert given["--gpu-memory-utilization"] == "0.3"
    cache = int(given["--kv-cache-memory-bytes"])
    assert cache == pytest.approx((0.3 * 24 - 3) * GIB - served_bytes(SMALL), abs=1)


def test_of_several_gpus_each_holds_its_part_of_the_weights():
    made = recipe(node={"gpus": 4})
    serves, trains = slots_of(made)
    assert serves.gpus == trains.gpus == (0, 1, 2, 3)
    spec = server_process(
        made, serves, Bucket("TP4", 4, 8, 512), facts(gpu_gib=24.0), model_dir="/m", shape=SMALL
    )
    given = dict(pairwise(spec.argv))
    cache = int(given["--kv-cache-memory-bytes"])
    assert given["--tensor-parallel-size"] == "4"
    assert cache == pytest.approx((0.3 * 24 - 4) * GIB - served_bytes(SMALL) / 4, abs=1)


def test_without_gpus_shares_are_of_the_host_s_memory():
    made, there = recipe(node={"gpus": 0}), facts(memory_gib=16.0)
    given = server(made, there)
    cache = int(given["--kv-cache-memory-bytes"])
    assert cache == pytest.approx((0.3 * 16 - 2) * GIB - served_bytes(SMALL, width=4), abs=1)
    assert "VLLM_CPU_KVCACHE_SPACE" not in given
    unknown = server(made, there, None)
    assert unknown["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "--kv-cache-memory-bytes" not in unknown


@pytest.mark.parametrize(
    ("rollout", "gpu_gib"),
    [
        ({}, 0.0),
        ({}, 8.0),
        ({"speculative": {"method": "eagle", "model": "/models/head"}}, 24.0),
    ],
    ids=["a GPU of unknown size", "nothing left", "a head"],
)
def test_where_the_law_says_nothing_vllm_measures(rollout: dict[str, Any], gpu_gib: float):
    given = server(recipe(rollout=rollout), facts(gpu_gib=gpu_gib))
    assert given["--gpu-memory-utilization"] == "0.3"
    assert "--kv-cache-memory-bytes" not in given


@pytest.mark.parametrize(
    ("given", "gpu_gib", "taken"),
    [(None, 24.0, "0.85"), (None, 79.6, "0.9"), (0.7, 24.0, "0.7"), (None, 0.0, "0.9")],
)
def test_of_a_small_gpu_that_it_has_alone_a_server_takes_less(
    given: float | None, gpu_gib: float, taken: str
):
    nodes = [{"host": "local", "gpus": 2, "slots": 2, "pool": ["rollout", "train"]}]
    rollout = {} if given is None else {"gpu_memory": given}
    made = Recipe.model_validate({"nodes": nodes, "model": {"path": "/m"}, "rollout": rollout})
    assert server(made, facts(gpu_gib=gpu_gib))["--gpu-memory-utilization"] == taken


def test_of_a_quantized_model_more_is_left():
    rollout = {"quantization": "fp8_per_channel"}
    there = facts(gpu_gib=48.0)
    plain, quantized = (
        int(server(made, there, LARGER)["--kv-cache-memory-bytes"])
        for made in (recipe(), recipe(rollout=rollout))
    )
    assert quantized - plain > GIB


@pytest.mark.parametrize(
    ("name", "share", "training"),
    [
        ("Qwen3-0.6B", {"rollout": 0.3, "train": 0.6}, {}),
        ("Qwen3-1.7B", {"rollout": 0.4, "train": 0.5}, {"lora": {"rank": 16, "alpha": 32}}),
    ],
)
def test_a_dry_run_says_that_small_models_fit_24_gb(
    name: str, share: dict[str, float], training: dict[str, Any], tmp_path: Path
):
    """What the shipped recipe says of itself."""
    document = recipe(
        node={"share": share},
        model={"path": f"/models/{name}", "max_len": 4096},
        environment={"name": "calculator"},
        training={"micro_batch_tokens": 8192, **training},
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(document.model_dump(mode="json", exclude_unset=True)))
    _, trainer, longest, servers, _ = plan_of(path)[1].memory
    assert f"; fits {share['train']:g} of GPUs of 24 GB or more" in trainer
    assert ": 24 GB " in longest
    assert f"on {share['rollout']:g} of GPUs of 24 GB 7." in servers


def test_the_shipped_recipe_fits_what_it_says():
    shown = plan_of(RECIPES / "one-gpu.yaml")[1]
    assert "fits 0.6 of GPUs of 24 GB or more" in shown.memory[1]
    (host,) = shown.hosts
    server, trainer = host.processes
    assert server.env["CUDA_VISIBLE_DEVICES"] == trainer.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert server.argv[-1] == "<what its share leaves beside the weights>"


@pytest.mark.parametrize("gpus", [0, 1])
def test_neighbours_come_and_go_without_one_another(gpus: int):
    """Each starts again while the other works on; the machine checks after every event that no two
    of its processes have what only one may have."""
    nodes = [{"host": host, "gpus": gpus, "share": SHARED["share"]} for host in ("a", "b")]
    faults = Faults(server_dies=0.005, trainer_dies=0.005, start_fails=0.1)
    world = World(Random(1), faults, small(nodes=nodes)).run()
    assert world.plan.train == ("a/1", "b/1")
    assert world.steps[-1].step == 5
    assert world.end is not None
    assert world.end.state == "finished"


def _shared(host: str, serve: str) -> dict[str, Any]:
    return {"host": host, "gpus": 1, "share": {"rollout": 0.3, "train": 0.6, "serve": serve}}


class _Onlooker(World):
    """Notes, whenever a request is sent and whenever a step begins, what the other half does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sent: Counter[tuple[str, bool]] = Counter()
        self.broken: Counter[str] = Counter()

    def _do_generate(self, action: a.Generate) -> None:
        busy = self.machine.training.state is TrainerState.BUSY
        self.sent[action.slot, busy] += 1
        super()._do_generate(action)

    def _do_abort_turn(self, action: a.AbortTurn) -> None:
        self.broken[action.slot] += 1
        super()._do_abort_turn(action)


@pytest.mark.parametrize("serve", ["always", "when-idle"])
def test_a_server_on_the_trainer_s_gpus_takes_requests_while_it_waits(serve: str):
    nodes = [_shared("a", serve), {"host": "b", "gpus": 1, "pool": "rollout"}]
    sent: Counter[tuple[str, bool]] = Counter()
    broken: Counter[str] = Counter()
    for seed in range(6):
        seen = _Onlooker(Random(seed), Faults(), small(nodes=nodes, run={"steps": 12}))
        assert seen.run().steps[-1].step == 12
        sent += seen.sent
        broken += seen.broken
    assert sent["a/0", False] > 0
    assert sent["b/0", True] > 0
    waits = serve == "when-idle"
    assert (sent["a/0", True] == 0, broken["a/0"] > 0) == (waits, waits)
    assert not broken["b/0"]


def test_turns_that_a_step_finds_on_its_gpus_go_on_with_what_they_have():
    """The world's model checks that no token of a turn is lost or doubled where it goes on."""
    nodes = [_shared(host, "when-idle") for host in ("a", "b")]
    faults = Faults(server_dies=0.005, trainer_dies=0.01, start_fails=0.1)
    seen = _Onlooker(Random(3), faults, small(nodes=nodes))
    seen.run()
    assert seen.steps[-1].step == 5
    assert sum(seen.broken.values()) > 0
    assert not any(busy for _, busy in seen.sent)
