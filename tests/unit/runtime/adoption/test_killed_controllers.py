"""A run whose controller is killed at any moment, again and again, and followed by another."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import Replica
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.launch.process import model_of, process_of, worker_of
from libra_cli.core.rollout.active import Stage
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.adopted_run import ended_before
from libra_cli.runtime.adoption.memory import RunMemory
from libra_cli.runtime.adoption.run_log import RunLog, replay
from libra_cli.runtime.adoption.takeover import Adoption, asked_again, connect, findings
from libra_cli.runtime.hosts.cluster import KeptCluster
from libra_cli.runtime.store.event_log import EventLog
from tests.elastic import scene
from tests.world import Faults, World, recipe, taught

TOKEN = "of-this-run"
KEPT = KeptCluster({"a": {"server-0": 1}}, {"a": "/model"}, {"a": "life"})


class KilledWorld(World):
    """Its controller can be killed; what runs on the hosts and what the trainer took stays."""

    run_dir: Path
    deaths: float = 0.0
    """The chance that a process is gone when the next controller comes."""
    killed: int = 0

    def begin(self) -> None:
        self.memory, self._number = RunMemory(), 0
        self.done: list[a.RuntimeAction] = []
        self._answers: dict[int, tuple[e.Event, int]] = {}
        self._taken: dict[tuple[int, int, int], list[Any]] = {}
        self._open_log()
        self.later(e.RunStarted())

    def _open_log(self) -> None:
        log = EventLog(self.run_dir, TOKEN, on_error=lambda error: pytest.fail(str(error)))
        self.log = RunLog(log, self.machine, self.memory, lambda: KEPT)

    # -- a controller at work -------------------------------------------------------------------

    def later(self, event: e.Event, least: float = 0.01, most: float = 1.0) -> None:
        """The first that comes of an action is its end."""
        self._answers[id(event)], self._number = (event, self._number), 0
        super().later(event, least, most)

    def give(self, event: e.Event) -> None:
        self.events += 1
        _, number = self._answers.get(id(event), (event, 0))
        self.log.happened(event, number, now=self.now)
        for action in self.machine.handle(event, now=self.now):
            if isinstance(action, a.Save | a.End):
                self._perform(action)
            else:
                self.ask(self.log.asked(action, now=self.now), action)
        self.log.settled()
        self.machine.check()

    def ask(self, number: int, action: a.RuntimeAction) -> None:
        self._number = number
        self.done.append(action)
        self._perform(action)
        if self._number:  # nothing comes of it
            self.log.happened(None, number, now=self.now)

    # -- the trainer knows what it has taken ----------------------------------------------------

    def _do_train(self, action: a.Train) -> None:
        if self._is_new(action.incarnation, action.step, 0, action.samples):
            super()._do_train(action)
            return
        self.later(e.StepDone(action.incarnation, action.step, None, {"loss": 0.1}))
        version = self._publish(action.incarnation, action.step)
        self.later(e.VersionPublished(action.incarnation, version), 1.0, 2.0)
        if action.ledger is not None:
            path = f"/checkpoint/{action.incarnation}-{action.step}"
            self.later(e.CheckpointSaved(action.incarnation, action.step, path), 1.0, 2.0)

    def _do_accumulate(self, action: a.Accumulate) -> None:
        if self._is_new(action.incarnation, action.step, action.part, action.samples):
            super()._do_accumulate(action)
        else:
            self.later(e.Accumulated(action.incarnation, action.step, action.part))

    def _is_new(self, incarnation: int, step: int, part: int, samples: Any) -> bool:
        given = [(sample.trajectory.id, sample.branch, sample.advantages) for sample in samples]
        known = self._taken.setdefault((incarnation, step, part), given)
        assert known == given, "the same step with another batch"
        return known is given

    # -- the next controller --------------------------------------------------------------------

    def go_on(self, *, dies: bool) -> None:
        """What may happen after an event, unless it was the last."""
        if self.end is None:
            self.kill() if dies else self._mishaps()

    def kill(self) -> None:
        """The controller is gone, and what it had not handled; another comes after a while."""
        self.killed += 1
        self.log.close()
        self._heap.clear()
        self._generating.clear()
        self.now += self.random.choice((1.0, 100.0))
        found = replay(self.run_dir, self.recipe, TOKEN)
        assert found.cluster == KEPT
        self.machine, self.memory = found.machine, found.memory
        self.machine.check()
        self._open_log()
        owners: Any = FakeOwners(self)
        last = self.memory.number
        connecting = connect(
            self.machine,
            self.memory,
            servers=owners.servers,
            workers=owners.workers,
            models=owners.models,
            trainer=owners.trainer,
        )
        failed = asyncio.run(connecting)
        assert failed == []
        for event in list(findings(self.machine, self.memory, self._alive())):
            self.give(event)
        for number, action in asked_again(self.machine, self.memory, last, now=self.now):
            self.ask(number, action)

    def _alive(self) -> dict[str, frozenset[str] | None]:
        return {node.name: self._alive_on(node.name) for node in self.recipe.nodes}

    def _alive_on(self, node: str) -> frozenset[str] | None:
        if self.random.random() < self.deaths:
            return None
        names = [name for at, name in self._processes() if at == node]
        return frozenset(name for name in names if self.random.random() >= self.deaths)

    def _processes(self) -> Iterator[tuple[str, str]]:
        servers, workers = self.machine.servers.replicas, self.machine.workers.replicas
        models = self.machine.models.replicas
        names = ((servers, process_of), (workers, worker_of), (models, model_of))
        for replicas, name in names:
            yield from ((one.slot.node, name(one.slot.id)) for one in _up(replicas.values()))
        training = self.machine.training
        if training.state not in (TrainerState.DOWN, TrainerState.FAILED):
            nodes = dict.fromkeys(replica.slot.node for replica in training.replicas)
            yield from ((node, f"trainer-{rank}") for rank, node in enumerate(nodes))


def _up(replicas: Any) -> list[Replica]:
    return [replica for replica in replicas if replica.up]


class FakeOwners:
    """Connects to everything. What the trainer still writes comes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: list[int] = []
        """Versions."""
        self.servers = self.workers = SimpleNamespace(adopt=self.adopt)
        self.models = SimpleNamespace(begin=lambda action: None)
        self.trainer = SimpleNamespace(adopt=self.adopt_trainer)

    async def adopt(self, action: a.StartServer | a.StartWorker, proved: object = None) -> None:
        return

    async def adopt_trainer(
        self, action: a.StartTrainer, *, versions: Iterable[int], checkpoint: int | None
    ) -> None:
        incarnation = action.incarnation
        assert incarnation == self.world.machine.training.incarnation
        for version in versions:
            self.asked.append(version)
            published = self.world._publish(incarnation, version)
            self.world.later(e.VersionPublished(incarnation, published))
        if checkpoint is not None:
            (path,) = (
                path for path in self.world.ledgers if f"/{incarnation}-{checkpoint}" in path
            )
            self.world.later(e.CheckpointSaved(incarnation, checkpoint, path))


def play(
    run_dir: Path, seed: int, faults: Faults, kills: float, deaths: float, **changes: Any
) -> KilledWorld:
    """To the end of the run."""
    world = KilledWorld(Random(seed), faults, recipe(**changes))
    world.run_dir, world.deaths = run_dir, deaths
    world.begin()
    when = Random(seed)
    while world.end is None:
        assert world._heap, f"nothing will ever happen again in {world.machine.phase}"
        assert world.events < 20_000
        world.now, _, event = heapq.heappop(world._heap)
        world.give(event)
        world.go_on(dies=when.random() < kills)
    return world


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_restarted_lost_or_trained_twice_when_only_controllers_die(
    tmp_path, seed, stream
):
    faults = Faults(repeated=0.05, written_later=0.3)
    training = {"groups_per_step": 3, "max_staleness": 1, "checkpoint_every": 2, "stream": stream}
    world = play(tmp_path, seed, faults, 0.03, 0.0, training=training)
    assert world.killed
    assert (world.end, world.machine.training.incarnation) == (a.End("finished", ""), 1)
    assert {one.restarts for one in world.machine.servers.replicas.values()} == {0}
    assert {step.step for step in world.steps} == {1, 2, 3, 4, 5}
    assert len(world.members) == len(set(world.members)) == 5 * 3 * 2
    assert not [one for one in world.trajectories if one.state == "failed"]


@pytest.mark.parametrize("seed", range(3))
def test_servers_that_sleep_are_adopted_and_woken_by_whoever_controls_the_run(tmp_path, seed):
    nodes = [
        {"host": "a", "slots": 2, "pool": "hybrid", "gpus": 2},
        {"host": "b", "slots": 2, "pool": "hybrid", "gpus": 2},
        {"host": "c", "pool": "train", "gpus": 1},
    ]
    faults = Faults(repeated=0.05, ordered=0.1, replanned=0.05)
    world = play(tmp_path, seed, faults, 0.05, 0.0, nodes=nodes, rollout={"sleep": True})
    assert world.killed
    assert world.end == a.End("finished", "")
    kinds = {type(action) for action in world.done}
    assert {a.SleepServer, a.WakeServer} <= kinds
    assert {one.restarts for one in world.machine.servers.replicas.values()} == {0}


@pytest.mark.parametrize("seed", range(3))
def test_what_a_teacher_has_said_is_kept_and_what_it_was_asked_is_asked_again(tmp_path, seed):
    world = play(
        tmp_path,
        seed,
        Faults(repeated=0.05, teacher_fails=0.2),
        0.05,
        0.0,
        teacher={"url": "http://teacher:8000/v1", "patience_s": 1e6},
        training={"loss": "distill", "groups_per_step": 3, "checkpoint_every": 2},
    )
    assert world.killed
    assert (world.end, world.machine.training.incarnation) == (a.End("finished", ""), 1)
    assert len(world.members) == len(set(world.members)) == 5 * 3 * 2
    for sample in world.samples:
        assert sample.token_advantages is not None
        said = taught(sample.tokens.token_ids)
        for mask, value, given in zip(
            sample.tokens.loss_mask, said, sample.token_advantages, strict=True
        ):
            assert given == pytest.approx((value + 1.0) * mask, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_ends_whatever_dies_while_it_has_no_controller(tmp_path, seed):
    faults = Faults(server_dies=0.003, sync_fails=0.02, turn_fails=0.02, written_later=0.3)
    world = play(tmp_path, seed, faults, 0.01, 0.1)
    assert world.end is not None
    scored = [one for one in world.trajectories if one.state == "failed" and one.reward is not None]
    assert scored == []


def test_a_run_that_had_ended_when_its_controller_was_killed_ends_with_the_next(tmp_path):
    world = play(tmp_path, 0, Faults(), 0.0, 0.0)  # its log is there until its models are made
    adoption = Adoption(replay(tmp_path, world.recipe, TOKEN), {})
    rows: list[Any] = []
    end = ended_before(adoption, rows.append)
    assert end == world.end == a.End("finished", "")
    assert [(row.state, row.step) for row in rows] == [("finished", world.machine.training.step)]


def test_every_version_that_was_not_told_of_is_asked_for():
    world = scene()
    training: Any = world.machine.training
    world.until(lambda: training.step == 3)
    training.published = replace(training.published, version=WeightVersion(1, 1))
    owners: Any = FakeOwners(world)
    connecting = connect(
        world.machine,
        RunMemory(),
        servers=owners.servers,
        workers=owners.workers,
        models=owners.models,
        trainer=owners.trainer,
    )
    assert asyncio.run(connecting) == []
    assert owners.asked == [2, 3]


@pytest.mark.parametrize(
    ("later_s", "left_s"), [(0.0, 60.0), (20.0, 40.0), (60.0, 0.0), (90.0, 0.0)]
)
def test_a_timer_goes_on_with_what_it_had_left(later_s, left_s):
    machine, memory = scene().machine, RunMemory()
    number = memory.ask(a.Wake("restart trainer", 60.0), now=100.0)
    again = asked_again(machine, memory, number, now=100.0 + later_s)
    assert again == [(number, a.Wake("restart trainer", left_s))]


def test_of_two_requests_of_a_trajectory_only_the_one_that_it_waits_for_is_made_again():
    world, memory = scene(), RunMemory()
    active = world.machine.rollout.active
    world.until(lambda: any(one.stage is Stage.GENERATING for one in active.values()))
    waited_for = next(one.request for one in active.values() if one.stage is Stage.GENERATING)
    asked = next(one for one in world.did(a.Generate) if one.request == waited_for)
    memory.ask(replace(asked, request=waited_for - 1), now=world.now)
    number = memory.ask(asked, now=world.now)
    assert asked_again(world.machine, memory, number, now=world.now) == [(number, asked)]
    assert list(memory.asked) == [number], "what nobody waits for is forgotten"


def test_what_the_next_controller_has_asked_itself_is_not_asked_twice():
    machine, memory = scene().machine, RunMemory()
    last = memory.ask(a.Wake("one", 60.0), now=0.0)
    memory.ask(a.Wake("two", 60.0), now=0.0)
    (again,) = asked_again(machine, memory, last, now=0.0)
    assert again[0] == last
