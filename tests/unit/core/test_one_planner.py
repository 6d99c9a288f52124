"""A live run, the simulator and a dry run decide alike: they ask one planner one question."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings

from libra_cli.app.costs import recipe_planner
from libra_cli.app.rebalance.observation import observation_of_run
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.costs.profile import Profile
from libra_cli.core.evidence import Recalibration
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.observation import MeasuredStep, Observation
from libra_cli.core.planning.controller import record_of_plan
from libra_cli.core.planning.planner import Planner, answer
from libra_cli.core.records import NodeRecord, PlanRecord
from libra_cli.core.run.observer import RunObserver
from libra_cli.core.run.state import Resume, RunIdentity
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.core.types import Plan, Role
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.plugins.finding import find
from libra_cli.runtime.performer import Performer
from libra_cli.runtime.store import journal as journal_module
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.replay import records_in_order
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.virtual_time import VirtualTime
from libra_cli.sim.world import SimPlanner
from tests import elastic, sample_run, sim_scene, world
from tests.research import judge_slots
from tests.world import machine_of

CASES = 2 * settings().max_examples
"""50 in ``make check``, 200 in ``make nightly``."""
LOOKS = 5
"""Times that one planner is asked."""


@cache
def profiles() -> tuple[Profile, ...]:
    return tuple(load_profile(name) for name in ("a800-qwen3-8b", "h100-qwen3-8b"))


@cache
def recipe_of(nodes: int, slots: int) -> Recipe:
    hosts = [{"host": f"n{index}", "gpus": 8, "slots": slots} for index in range(nodes)]
    buckets = [{"name": "all", "tensor_parallel": 8 // slots, "max_num_seqs": 64}]
    return Recipe.model_validate(
        {"nodes": hosts, "model": {"path": "/m"}, "rollout": {"buckets": buckets}}
    )


@cache
def open_recipe_of(gpus: int) -> Recipe:
    """A node of four GPUs and one of so many, without slots."""
    hosts = [{"host": "n0", "gpus": 4}, {"host": "n1", "gpus": gpus}]
    return Recipe.model_validate({"nodes": hosts, "model": {"path": "/m"}})


def some_observation(random: Random) -> tuple[Planner, Observation]:
    """Any recipe, workload, measurements, pins and memory of an earlier decision."""
    recipe = recipe_of(random.randint(2, 4), random.choice((1, 2)))
    if random.random() < 0.2:
        recipe = open_recipe_of(random.choice((4, 8)))
    today, slots = initial_plan(recipe), slots_of(recipe)
    length = int(10 ** random.uniform(2, 4))
    samples = tuple(
        TrajectorySample(random.randint(50, 2000), 1 + int(random.expovariate(1 / length)))
        for _ in range(8)
    )
    steps = tuple(
        MeasuredStep(
            step_s=(step_s := random.uniform(5, 200)),
            train_s=step_s * random.random(),
            waited_s=step_s * random.random() * 0.5,
            in_play_s=step_s * random.uniform(1, 300),
            concurrency=random.uniform(1, 300),
        )
        for _ in range(random.randint(0, 4))
    )
    seen = Observation(
        step=random.randint(1, 90),
        plan=today,
        slots=slots,
        workload=Workload(samples, random.choice((64, 512)), random.choice((1.0, 2.0, 5.0))),
        pins=random.choice(((), ((dict(today.servers).popitem()[0], Role.ROLLOUT),))),
        measured=steps,
        lengths=tuple(random.uniform(100, 9000) for _ in range(random.randint(0, 6))),
        recalibration=random.choice((None, Recalibration(random.uniform(0.3, 3), 1.0))),
        steps_left=random.choice((None, 0, 5, 100)),
    )
    profile = random.choice(profiles())
    planner = recipe_planner(recipe, lambda plan, evidence: profile, elastic=True)
    return replace(planner, settings=replace(planner.settings, groups=8)), seen


def in_a_live_run(planner: Planner, actions: list[a.Propose]) -> list[e.Event | None]:
    """What the runtime's performer makes of them, each in a thread."""
    nobody = cast("Any", None)
    performer = Performer(nobody, nobody, nobody, nobody, nobody, nobody, nobody, planner)

    async def every() -> list[e.Event | None]:
        return [await performer.perform(action) for action in actions]

    return asyncio.run(every())


def in_the_simulator(planner: Planner, action: a.Propose) -> e.Event:
    """What the simulated world makes of it."""
    time = VirtualTime()
    SimPlanner(time, partial(answer, planner), {}).perform(action)
    event = time.next()
    assert not isinstance(event, tuple)
    assert not callable(event)
    return event


@pytest.mark.timeout(600)  # 0.2 s an example on an idle core, 100 of them in the long profile
def test_the_same_observation_gives_the_same_decision_live_and_simulated() -> None:
    random, moved, stayed = Random(0), 0, 0
    for _ in range(CASES // LOOKS):
        planner, first = some_observation(random)
        asked = [a.Propose("asked for", first, "order")]
        for number in range(LOOKS - 1):
            _, other = some_observation(random)
            seen = replace(first, measured=other.measured, steps_left=other.steps_left)
            asked.append(a.Propose(f"look {number}", replace(seen, lengths=other.lengths)))
        for action, live in zip(asked, in_a_live_run(planner, asked), strict=True):
            assert live == in_the_simulator(planner, action)
            moved += isinstance(live, e.PlanChosen)
            stayed += isinstance(live, e.PlanKept)
    assert moved + stayed == CASES
    assert min(moved, stayed) > CASES / 20, "both kinds of decision are met"


def test_a_decision_needs_nothing_but_its_observation() -> None:
    """Asked in another order, by another planner of the same make, it says the same."""
    random = Random(1)
    cases = [some_observation(random) for _ in range(40)]
    forth = [decided(*case) for case in cases]
    back = [decided(*case) for case in reversed(cases)]
    assert forth == list(reversed(back))


def decided(planner: Planner, seen: Observation) -> tuple[Plan | None, str]:
    fresh = Planner(planner.space, planner.costs, planner.settings)
    decision = fresh.decide(seen)
    return decision.plan, decision.why_not


class Journalled:
    """A simulated run whose records go into a database, as a live run's do."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        scene = sim_scene.scene(steps=12)
        rest, slots = scene.plan.servers[1:], scene.slots
        self.planner = Remembering(Plan(rest, scene.plan.train), slots[1:])
        trace = sim_scene.made_up(2)
        self.world = sim_scene.world(
            find(POLICIES, "libra")(), trace.groups(Random(0), 4), here=scene, planner=self.planner
        )

    def run(self) -> None:
        sim_scene.run_into(self.run_dir, self.world)


class Remembering(sim_scene.Scripted):
    """Keeps every observation that it is asked about."""

    seen: list[Observation] = []  # noqa: RUF012

    def decide(self, now: Observation) -> Any:
        self.seen.append(now)
        return super().decide(now)


def assert_alike(replayed: Workload, seen: Workload) -> None:
    """The same trajectories. What tools take now is told by the newest turns, which a database has
    in the order in which they ended, and a machine in that in which their tools returned."""
    bare = [
        sorted((replace(sample, tool_s=0.0) for sample in work.samples), key=repr)
        for work in (replayed, seen)
    ]
    assert bare[0] == bare[1]
    spent = [sum(sample.tool_s for sample in work.samples) for work in (replayed, seen)]
    assert spent[0] == pytest.approx(spent[1], rel=0.02)


def test_a_database_shows_a_dry_run_what_the_machine_showed_its_planner(tmp_path: Path) -> None:
    run = Journalled(tmp_path)
    run.run()
    machine, recipe = run.world.machine, run.world.machine.recipe
    with Reader(tmp_path) as reader:
        again = observation_of_run(reader, recipe, live=True)
    own = machine.observe()
    assert own is not None
    assert again.step == own.step
    assert again.lengths == own.lengths
    assert again.plan.servers == machine.plan.servers
    assert len(again.measured) == len(own.measured)
    for replayed, seen in zip(again.measured, own.measured, strict=True):
        assert replayed.step_s == pytest.approx(seen.step_s)
        assert replayed.in_play_s == pytest.approx(seen.in_play_s)
        assert replayed.concurrency == pytest.approx(seen.concurrency)
    assert_alike(again.workload, own.workload)
    assert again.evidence.steps == own.evidence.steps
    assert again.evidence.ranks == own.evidence.ranks
    assert len(again.evidence.turns) == len(own.evidence.turns)
    assert again.recalibration == machine.controller.recalibration == Recalibration(1.0, 1.0)


def test_a_database_tells_what_frozen_models_are_asked_as_the_machine_does(tmp_path: Path) -> None:
    made = judge_slots.recipe(steps=4, bound=1, groups=1)
    run = judge_slots.world(made, judge_slots.static_plan(made, 5, 1), 10.0, seed=0)
    sim_scene.run_into(tmp_path, run)
    with Reader(tmp_path) as reader:
        dry = observation_of_run(reader, made, live=True)
    own = run.machine.observe()
    assert own is not None
    (demand,) = own.workload.models
    assert demand.busy_s == pytest.approx(8 * 10.0, rel=0.3)  # eight trajectories a step
    assert dry.workload.models == (demand,)


def test_a_run_that_goes_on_has_forgotten_nothing(tmp_path: Path) -> None:
    run = Journalled(tmp_path)
    run.run()
    before = run.world.machine
    with Reader(tmp_path) as reader:
        records = records_in_order(reader)
        plans, moves = reader.plans(), reader.moves()
    position = before.ledger.position(before.training.step)
    again = machine_of(
        before.recipe,
        before.plan,
        before.controller.slots,
        RunIdentity("again", "", 1, 0.0),
        resume=Resume("checkpoint", position, 0, records),
    )
    own, seen = before.observe(), again.observe()
    assert own is not None
    assert seen is not None
    assert_alike(seen.workload, own.workload)
    assert (seen.lengths, seen.sync_s) == (own.lengths, own.sync_s)
    assert seen.evidence.steps == own.evidence.steps
    assert len(seen.evidence.turns) == len(own.evidence.turns) > 0
    now = run.world.now + 3600.0
    done = again.handle(e.RunStarted(), now=now)
    rows = [action.record for action in done if isinstance(action, a.Save)]
    (first,) = [row for row in rows if isinstance(row, PlanRecord)]
    assert first.plan == plans[-1].plan + 1
    assert again.reconciler._tracker._number == moves[-1].move
    assert again.observe().measured == ()  # type: ignore[union-attr]
    with Journal(tmp_path) as journal:
        journal.save(first)
    with Reader(tmp_path) as reader:
        dry = observation_of_run(reader, before.recipe, live=True)
    assert dry.recalibration is again.controller.recalibration is None


@dataclass
class KeptScene(elastic.Scene):
    """A world whose rows go into a database as they are written, by its own clock."""

    journal: Journal | None = None

    def _perform(self, action: a.Action) -> None:
        super()._perform(action)
        if self.journal is not None and isinstance(action, a.Save):
            self.journal.save(action.record)


def kept_scene(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> KeptScene:
    run = elastic.scene(make=KeptScene)
    assert isinstance(run, KeptScene)
    clock = SimpleNamespace(time=lambda: run.now, monotonic=time.monotonic)
    monkeypatch.setattr(journal_module, "time", clock)
    for record in run.records:
        journal.save(record)
    run.journal = journal
    return run


def test_a_database_tells_when_a_host_was_given_up_and_was_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assert_measured(steps: int) -> None:
        journal.flush()
        with Reader(tmp_path) as reader:
            dry = observation_of_run(reader, run.recipe, live=True)
        own = run.machine.observe()
        assert own is not None
        assert len(dry.measured) == len(own.measured) == steps

    with Journal(tmp_path) as journal:
        run = kept_scene(journal, monkeypatch)
        run.steps_on(3)
        run.give(e.NodeLost("b", "cable"))
        assert_measured(3)
        run.give(e.NodeGone("b", "its lease has run out"))
        assert_measured(0)
        run.steps_on(3)
        assert_measured(3)
        run.give(e.NodeBack("b", frozenset()))
        server = run.machine.servers.replicas["b/0"]
        run.until(lambda: server.state is ReplicaState.SERVING)
        assert_measured(0)


def test_an_ended_run_is_measured_by_no_step_without_a_host_that_it_would_have_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*, live: bool) -> int:
        journal.flush()
        with Reader(tmp_path) as reader:
            return len(observation_of_run(reader, run.recipe, live=live).measured)

    with Journal(tmp_path) as journal:
        run = kept_scene(journal, monkeypatch)
        run.steps_on(3)
        assert measured(live=False) == 3
        run.give(e.NodeLost("b", "cable"))
        run.give(e.NodeGone("b", "its lease has run out"))
        run.steps_on(3)
        assert (measured(live=True), measured(live=False)) == (3, 0)
        observer, again = (
            RunObserver(run.recipe),
            record_of_plan(9, run.plan, run.now, "start", None),
        )
        for rows, lacks in ((run.records, True), ([again], False)):
            for row in rows:
                observer.saw(row)
            assert observer.lacks_slots == lacks, "a run that goes on begins on all its hosts"
        run.give(e.NodeBack("b", frozenset()))
        servers = run.machine.servers.replicas.values()
        run.until(lambda: all(one.state is ReplicaState.SERVING for one in servers))
        run.steps_on(3)
        assert measured(live=False) == 3


def test_a_dry_run_knows_the_hosts_that_are_given_up_and_holds_their_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def host_b(state: str, *, live: bool = True) -> Observation:
        journal.save(NodeRecord("b", "b", state, run.now, "", ""))
        journal.flush()
        with Reader(tmp_path) as reader:
            return observation_of_run(reader, run.recipe, live=live)

    with Journal(tmp_path) as journal:
        run = kept_scene(journal, monkeypatch)
        run.give(e.NodeLost("b", "cable"))
        assert host_b("unreachable").gone == set()
        run.give(e.NodeGone("b", "its lease has run out"))
        own = run.machine.observe()
        assert own is not None
        for state in ("failed", "connecting"):
            dry = host_b(state)
            assert dry.gone == own.gone == {"b"}
            assert dry.pins == own.pins
            assert dry.working(dry.plan).servers == own.working(own.plan).servers
        assert host_b("failed", live=False).gone == set(), "it would have to be there"
        assert host_b("ready").gone == set()


def test_the_time_in_which_a_run_did_not_run_is_in_no_step() -> None:
    observer = RunObserver(world.recipe(training={"groups_per_step": 8}))
    observer.saw(record_of_plan(0, Plan((), ("a/0",)), 0.0, "start", None))
    for step in range(1, 4):
        row = sample_run.step_record(step, step * 10.0, started_at=step * 10.0 - 4)
        observer.saw(replace(row, waited_s=6.0))
    assert [step.step_s for step in observer.measured] == [10.0, 10.0]
    observer.saw(record_of_plan(1, Plan((), ("a/0",)), 5000.0, "start", None))
    for step in range(4, 7):
        ended = 5000.0 + step * 10.0
        row = sample_run.step_record(step, ended, started_at=ended - 4)
        observer.saw(replace(row, waited_s=6.0))
    assert [step.step_s for step in observer.measured] == [10.0, 10.0]
