"""The simulated outside: nothing lost, the same every time, plans that change."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from libra_cli.core.actions import Generate
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.events import TurnGenerated
from libra_cli.core.reconcile.reconciler import GRACE_S
from libra_cli.core.rollout.active import ActiveTrajectory
from libra_cli.core.run.machine import Machine
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.core.scheduling.server_queues import Request
from libra_cli.core.types import Plan, Pool, Slot, TrajectoryId, WeightVersion
from libra_cli.plugins.finding import find
from libra_cli.sim.engine import Engine, EngineRequest, FinishedRequest
from libra_cli.sim.servers import SimServers
from libra_cli.sim.world import World
from tests import sim_scene

TRACE = sim_scene.made_up(2)


def run(policy: str = "libra", seed: int = 0, **more: object) -> World:
    groups = TRACE.groups(Random(seed), 4)
    world = sim_scene.world(find(POLICIES, policy)(), groups, **more)  # type: ignore[arg-type]
    world.run()
    return world


@pytest.mark.parametrize("policy", POLICIES.shipped)
def test_every_step_trains_a_full_batch_and_no_trajectory_twice(policy: str) -> None:
    world = run(policy)
    assert [step.step for step in world.recording.steps] == [1, 2, 3]
    ended = Counter((t.group_id, t.member, t.attempt) for t in world.recording.trajectories)
    assert max(ended.values()) == 1
    for row in world.recording.trajectories:
        who = TrajectoryId(row.group_id, row.member, row.attempt)
        assert row.generated_tokens == world.episode(who).generated


def test_the_same_seed_gives_the_same_run() -> None:
    first, second, other = run(seed=3), run(seed=3), run(seed=4)
    assert first.recording.turns == second.recording.turns
    assert first.recording.turns != other.recording.turns


def test_strangers_that_stand_for_siblings_have_one_prompt_and_compute_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each task of the trace was recorded three times, and a group has four members."""
    asked: dict[int, set[object]] = {}
    submit = Engine.submit

    def seen(engine: Engine, request: EngineRequest, now: float) -> None:
        assert isinstance(request.session, TrajectoryId)
        asked.setdefault(request.session.group, set()).add(request.shared)
        submit(engine, request, now)

    monkeypatch.setattr(Engine, "submit", seen)
    world = run()
    for group, shared in asked.items():
        members = [world.episode(TrajectoryId(group, member)) for member in range(4)]
        assert len({member.task for member in members}) > 1
        assert shared == {(group, members[0].prompt)}


@pytest.mark.parametrize("rule", [{}, {"rule": "soft"}, {"rule": "cut"}])
def test_settling_after_every_event_finds_nothing_more_to_do(
    monkeypatch: pytest.MonkeyPatch, rule: dict[str, str]
) -> None:
    scene = sim_scene.scene(steps=4, max_staleness=1)
    training = scene.recipe.training.model_copy(
        update={"staleness": type(scene.recipe.training.staleness).model_validate(rule)}
    )
    scene = replace(scene, recipe=scene.recipe.model_copy(update={"training": training}))
    quick = run(here=scene).recording
    monkeypatch.setattr(Machine, "_is_quiet", lambda self, event: False)
    assert run(here=scene).recording == quick


def test_kept_kv_is_never_older_than_a_trajectory_s_first_turn_and_spares_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Generate] = []
    generate = SimServers._generate

    def seen(servers: SimServers, action: Generate) -> None:
        asked.append(action)
        generate(servers, action)

    monkeypatch.setattr(SimServers, "_generate", seen)
    scene = sim_scene.scene(steps=6)
    again = {}
    for clear in (True, False):
        asked.clear()
        sync = scene.recipe.weight_sync.model_copy(update={"clear_cache": clear})
        recipe = scene.recipe.model_copy(update={"weight_sync": sync})
        world = run(here=replace(scene, recipe=recipe))
        engines = [*world.servers.engines.values(), *(one for _, one in world.servers.retired)]
        again[clear] = sum(engine.reprefilled_tokens for engine in engines)
        first: dict[TrajectoryId, WeightVersion] = {}
        for turn in asked:
            begun = first.setdefault(turn.trajectory, turn.cache_key)
            oldest = turn.cache_key if clear else min(begun, turn.cache_key)
            assert turn.kv_key == oldest
        older = sum(turn.kv_key < turn.cache_key for turn in asked)
        assert older == 0 if clear else older > 20
    assert again[False] < again[True] / 2


def test_a_turn_met_by_new_weights_is_cached_under_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its trajectory's next turn finds what the server has computed again."""
    answered: dict[TrajectoryId, TurnGenerated] = {}
    known: list[tuple[WeightVersion, WeightVersion | None]] = []
    generated, ask = SimServers._generated, ActiveTrajectory.next_request

    def answer(
        servers: SimServers, asked: Generate, done: FinishedRequest
    ) -> Iterator[TurnGenerated]:
        for turn in generated(servers, asked, done):
            answered[turn.trajectory] = turn
            yield turn

    def asks(active: ActiveTrajectory, now: float) -> Request:
        request = ask(active, now)
        if (turn := answered.get(request.trajectory)) is not None and request.turns:
            assert request.last_key == turn.newest
            known.append((turn.cache_key, request.last_key))
        return request

    monkeypatch.setattr(SimServers, "_generated", answer)
    monkeypatch.setattr(ActiveTrajectory, "next_request", asks)
    run(here=sim_scene.scene(steps=6))
    assert sum(key != asked for asked, key in known) > 5


def test_no_group_is_played_again_for_its_age() -> None:
    """Training waits for a group that a step is the last one for, and trajectories begin only
    where the newest version is: so nothing that is played is thrown away."""
    world = run(here=sim_scene.scene(steps=8, max_staleness=1, staleness="hold"))
    assert all(t.attempt == 0 for t in world.recording.trajectories)
    assert all(step.staleness_max <= 1 for step in world.recording.steps)


def test_servers_move_while_the_others_go_on() -> None:
    scene = sim_scene.scene(steps=6)
    (first, second, *rest), train = scene.plan.servers, scene.slots[-1]
    big = Slot("node/0x2", "node", (0, 1), Pool.HYBRID)
    plan = Plan(((big.id, sim_scene.BUCKETS[2]), *rest), scene.plan.train)
    kept = [slot for slot in scene.slots if slot.id not in (first[0], second[0])]

    planner = sim_scene.Scripted(plan, (big, *kept))
    world = run(here=scene, planner=planner)
    assert train in kept
    spans = world.spans()
    drained = [span for span in spans if span[1] == "draining"]
    assert {span[0] for span in drained} <= {first[0], second[0]}
    served = next(span for span in spans if span[0] == big.id and span[1] == "serving")
    gone = max(span[3] for span in spans if span[0] in (first[0], second[0]) and span[1] != "idle")
    assert served[2] >= gone + scene.start_s(sim_scene.BUCKETS[2])
    for slot, _ in rest:
        assert [span[1] for span in spans if span[0] == slot].count("serving") == 1
    assert all(t.attempt == 0 for t in world.recording.trajectories), "and nothing is lost"


def slow(cost: ServerLaw) -> ServerLaw:
    """The same with a second more on every engine step."""
    return replace(cost.linear(), step_s=cost.linear().step_s + 1.0)


def test_turns_longer_than_a_drain_go_on_elsewhere_with_what_they_had() -> None:
    quick = sim_scene.scene(steps=6)
    scene = replace(quick, cost_of=lambda bucket: slow(quick.cost_of(bucket)))
    *rest, (leaving, _) = scene.plan.servers
    left = tuple(slot for slot in scene.slots if slot.id != leaving)
    plan = Plan(tuple(rest), scene.plan.train)

    planner = sim_scene.Scripted(plan, left)
    world = run(here=scene, planner=planner)
    ((_, _, began, ended),) = [span for span in world.spans() if span[:2] == (leaving, "draining")]
    assert ended - began == pytest.approx(GRACE_S, rel=0.1), "and the abort takes a step"
    # One turn, begun on one server and ended on another.
    assert any(row.started_at < began and row.ended_at > ended for row in world.recording.turns)
    gone = [row for row in world.recording.turns if row.slot == leaving]
    assert max(row.ended_at for row in gone) <= ended
    for row in world.recording.trajectories:
        who = TrajectoryId(row.group_id, row.member, row.attempt)
        assert row.generated_tokens == world.episode(who).generated


def test_gpus_join_training_as_a_worker_that_the_machine_starts_and_shorten_a_step() -> None:
    scene = sim_scene.scene(steps=6)
    (*rest, last), freed = scene.plan.servers, scene.slots[3]
    worker = Slot("node/worker", "node", freed.gpus, Pool.HYBRID)
    slots = (worker, *(slot for slot in scene.slots if slot.id != last[0]))
    plan = Plan(tuple(rest), scene.plan.train, gradient=(worker.id,))
    world = run(here=scene, planner=sim_scene.Scripted(plan, slots))
    took = [end - start for start, end in world.recording.trained]
    assert took[0] == pytest.approx(40 / 8)
    assert took[-1] < 40 / 8, "the worker computes a part"
    states = [row.state for _, row in world.recording.slots if row.slot == worker.id]
    assert states[:3] == ["starting", "joining", "training"]


def test_a_server_takes_a_workers_gpus_after_its_share_has_ended() -> None:
    scene = sim_scene.scene(steps=6)
    (first, *rest), freed = scene.plan.servers, scene.slots[0]
    worker = Slot("node/worker", "node", freed.gpus, Pool.HYBRID)
    slots = (worker, *scene.slots)
    begins = replace(
        scene, plan=Plan(tuple(rest), scene.plan.train, gradient=(worker.id,)), slots=slots
    )
    back = Plan((first, *rest), scene.plan.train)
    world = run(here=begins, planner=sim_scene.Scripted(back, scene.slots))
    spans = world.spans()
    served = next(span for span in spans if span[:2] == (first[0], "serving"))
    ended = [end for _, end in world.recording.trained if end <= served[2]]
    assert ended, "a step ended before the server came"
    assert served[2] >= ended[-1] - 1e-9


def test_a_step_tells_how_long_a_full_batch_waited_for_the_staleness_rule() -> None:
    held, free = (
        [step.held_s for step in run(here=sim_scene.scene(steps=8, **rule)).recording.steps]
        for rule in ({"staleness": "hold", "max_staleness": 1}, {"staleness": "soft"})
    )
    assert max(held) > 0
    assert max(free) == 0


def test_no_full_batch_is_held_back_longer_than_training_waits() -> None:
    steps = run(here=sim_scene.scene(steps=8, max_staleness=1)).recording.steps
    assert all(0 <= step.held_s <= step.waited_s for step in steps)


@pytest.mark.parametrize("stream", [False, True])
def test_the_trainer_works_in_every_part_of_a_step(stream: bool) -> None:
    tape = run(here=sim_scene.scene(steps=8, stream=stream)).recording
    assert bool(tape.parts) is stream
    assert len(tape.trained) == len(tape.steps)
    worked = sum(step.train_s for step in tape.steps)
    assert 1.0 - tape.idle_train == pytest.approx(worked / tape.ended_at)
