"""A trainer whose ranks are on two SSH hosts, through the parts that a run uses."""

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
from libra_cli.core.cluster.placement import initial_plan, slots_of
from libra_cli.core.records import Record
from libra_cli.core.types import Trajectory, TrajectoryId, VersionSpan
from libra_cli.runtime.hosts.agent_messages import Exited
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.trainer.processes import TrainerProcesses
from tests.live import require
from tests.netns import Network, missing, network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
require("accelerate")

DEADLINE_S = 200


def recipe(net: Network, base: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"lease_s": 30},
            "nodes": [
                {
                    "host": host.address,
                    "identity": net.identity,
                    "python": sys.executable,
                    "workdir": str(base / host.name),
                    # Hosts that share their cores: threads that wait for each other spin.
                    "env": {"OMP_NUM_THREADS": "1"},
                    "pool": pool,
                }
                for host, pool in zip(net.hosts, ["train", "train", "rollout"], strict=True)
            ],
            "model": {"build": {"warm_steps": 1}, "max_len": 128},
            "environment": {"name": "pointer-chase"},
            "rollout": {"group_size": 2, "max_turn_tokens": 16},
            "training": {"groups_per_step": 2, "checkpoint_every": 1},
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
            trajectory.spans = [VersionSpan(0, 10, 16)]
            trajectory.reward = float(member)
            samples.append(TrainSample(trajectory, held=0, fresh=False))
    return tuple(samples)


def test_two_hosts_form_one_world_train_and_fail_together(tmp_path, monkeypatch):
    with network(3, tmp_path / "net") as net:
        monkeypatch.setenv("HOME", str(net.home))
        asyncio.run(asyncio.wait_for(_scene(recipe(net, tmp_path), tmp_path), DEADLINE_S))


async def _scene(wanted: Recipe, base: Path) -> None:
    posted: asyncio.Queue[e.Event] = asyncio.Queue()
    saved: list[Record] = []
    plan = initial_plan(wanted)
    slots = {slot.id: slot for slot in slots_of(wanted)}
    cluster = Cluster(
        wanted, plan, run_id="world", token="secret", save=saved.append, clock=time.time
    )
    try:
        await cluster.open(base / "model")
        ranks = TrainerProcesses(
            cluster, slots, head=slots[plan.train[0]].node, post=posted.put_nowait
        )
        cluster.on_event = lambda event: ranks.exited(event) if isinstance(event, Exited) else None

        started = await ranks.start(StartTrainer(1, plan.train, ""))
        assert isinstance(started, e.TrainerStarted), started
        assert started.published.version.step == 0

        done = await ranks.train(Train(1, 1, batch(), {"step": 1}, started.published))
        assert isinstance(done, e.StepDone), done
        assert done.published.version.step == 1
        assert done.metrics["generated_tokens"] == 24
        assert isinstance(await posted.get(), e.CheckpointSaved)

        second = plan.train[1].rpartition("/")[0]
        await cluster.hosts[second].stop("trainer-1", grace_s=0.1)
        again = await ranks.train(Train(1, 2, batch(), None, done.published))
        failed = again or await posted.get()
        assert isinstance(failed, e.TrainerFailed), failed

        assert await ranks.stop(StopTrainer(1, plan.train)) == e.TrainerStopped(1)
        await ranks.close()
    finally:
        assert await cluster.close() == []
