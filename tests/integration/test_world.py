"""A trainer whose shards are on two SSH hosts that share no disk, through the parts a run uses."""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from pathlib import Path

import pytest

from libra_cli.config.recipe import Recipe
from libra_cli.core import events as e
from libra_cli.core.actions import StartTrainer, StopTrainer, Train, TrainSample
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.records import Record
from libra_cli.core.types import Trajectory, TrajectoryId, VersionSpan
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.hosts.agent_messages import Exited
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.trainer.checkpoints import find_checkpoints
from libra_cli.runtime.trainer.model_export import ModelExports, fetch_model
from libra_cli.runtime.trainer.processes import TrainerProcesses
from tests.live import require
from tests.netns import Network, missing, network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(340),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
require("accelerate")

DEADLINE_S = 280


def recipe(net: Network) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"lease_s": 30},
            "nodes": [
                {
                    "host": host.address,
                    "identity": net.identity,
                    "python": sys.executable,
                    # A host's own: every namespace has a /dev/shm of its own.
                    "workdir": "/dev/shm/libra-work",
                    # Hosts that share their cores: threads that wait for each other spin.
                    "env": {"OMP_NUM_THREADS": "1"},
                    "pool": pool,
                }
                for host, pool in zip(net.hosts, ["train", "train", "rollout"], strict=True)
            ],
            "model": {"build": {}, "max_len": 128},
            "environment": {"name": "pointer-chase"},
            "rollout": {"group_size": 2, "max_turn_tokens": 16},
            "training": {"groups_per_step": 2, "checkpoint_every": 1, "sharding": "fsdp2"},
        }
    )


def batch() -> tuple[TrainSample, ...]:
    """Two groups of two, one rewarded in each."""
    samples = []
    for group in range(2):
        for member in range(2):
            ids = [*range(10, 20), *range(30 + member, 36 + member)]
            trajectory = Trajectory(TrajectoryId(group, member))
            trajectory.token_ids = array("i", ids)
            trajectory.logprobs = array("f", [0.0] * 10 + [-3.0] * 6)
            trajectory.loss_mask = array("b", [0] * 10 + [1] * 6)
            trajectory.add_span(VersionSpan(0, 10, 16))
            trajectory.reward = float(member)
            samples.append(TrainSample(trajectory, 0, False, ((0, 2.0 * member - 1),)))
    return tuple(samples)


def test_two_hosts_train_together_fail_together_and_leave_parts_for_others(tmp_path, monkeypatch):
    with network(3, tmp_path / "net") as net:
        monkeypatch.setenv("HOME", str(net.home))
        asyncio.run(asyncio.wait_for(_scene(recipe(net), tmp_path), DEADLINE_S))
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names


async def _export(cluster: Cluster, to: Path) -> None:
    """The model of the first checkpoint, made on a host and brought here."""
    first, *_ = await find_checkpoints(cluster.hosts)
    assert (first.step, len(first.nodes)) == (1, 2)
    addresses = {node: fact.peer_address for node, fact in cluster.facts.items()}
    card = {"name": "small", "base": "base", "tags": ["libra"], "body": "# small"}
    exports = ModelExports(cluster.reached, addresses, lambda step: card, cluster.secrets)
    made = await exports.make(first)
    await fetch_model(cluster.hosts[made.node], made.path, to)
    assert (await exports.make(first)).seconds < made.seconds


async def _scene(wanted: Recipe, base: Path) -> None:
    posted: asyncio.Queue[e.Event] = asyncio.Queue()
    saved: list[Record] = []
    plan = initial_plan(wanted)
    slots = {slot.id: slot for slot in slots_of(wanted)}
    cluster = Cluster(
        wanted, plan, run_id="world", secrets=RunSecrets.new(), save=saved.append, clock=time.time
    )
    try:
        await cluster.open(base / "model")
        ranks = TrainerProcesses(
            wanted, cluster, slots, head=slots[plan.train[0]].node, post=posted.put_nowait
        )
        cluster.events.subscribe(
            lambda event: ranks.processes.exited(event) if isinstance(event, Exited) else None
        )

        started = await ranks.perform(StartTrainer(1, plan.train, ""))
        assert isinstance(started, e.TrainerStarted), started
        assert started.published.version.step == 0

        done = await ranks.perform(Train(1, 1, batch(), {"step": 1}, started.published.version))
        assert isinstance(done, e.StepDone), done
        told = [await posted.get() for _ in range(2)]  # in any order
        (version,) = [event for event in told if isinstance(event, e.VersionPublished)]
        assert version.published.version.step == 1
        assert done.metrics["generated_tokens"] == 24
        (saved_at,) = [event for event in told if isinstance(event, e.CheckpointSaved)]

        second = plan.train[1].rpartition("/")[0]
        await cluster.hosts[second].stop("trainer-1", grace_s=0.1)
        again = await ranks.perform(Train(1, 2, batch(), None, version.published.version))
        failed = again or await posted.get()
        assert isinstance(failed, e.TrainerFailed), failed

        assert await ranks.perform(StopTrainer(1, plan.train)) == e.TrainerStopped(1)

        # The third host has no part of the checkpoint, and the second is no longer in the world.
        elsewhere = (plan.train[0], next(slot for slot in slots if slot not in plan.train))
        began = await ranks.perform(StartTrainer(2, elsewhere, saved_at.path))
        assert isinstance(began, e.TrainerStarted), began
        assert began.published.version.step == 1
        on = await ranks.perform(Train(2, 2, batch(), {"step": 2}, began.published.version))
        assert isinstance(on, e.StepDone), on
        assert await ranks.perform(StopTrainer(2, elsewhere)) == e.TrainerStopped(2)
        await ranks.close()
        await _export(cluster, base / "mine")
    finally:
        assert await cluster.close() == []
