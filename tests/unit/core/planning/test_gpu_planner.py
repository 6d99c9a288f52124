"""On any number of GPUs: a plan changes when that pays, by few moves; the baselines keep rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.core.costs.observed import UNCHECKED_GIB
from libra_cli.core.costs.profile import NothingFits, Profile
from libra_cli.core.launch.gpu_nodes import GpuNodes, gpus_of
from libra_cli.core.observation import MeasuredStep, Observation
from libra_cli.core.planning.admission import Admission
from libra_cli.core.planning.baselines import (
    PLANNERS,
    STATIC,
    PlannerError,
    first_layout,
    planner_of,
)
from libra_cli.core.planning.gpu_placement import GpuPlacement, PinnedSlots, TrainerNeeds
from libra_cli.core.planning.planner import Decision, DecisionMaker, Planner
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search, least_regret
from libra_cli.core.planning.transition import moves_between
from libra_cli.core.planning.triggers import COOLDOWN
from libra_cli.core.types import Bucket, Plan, Pool, Role, Slot, node_of
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile

A800 = load_profile("a800-qwen3-14b")
ROOMY = replace(A800.training, facts=replace(A800.facts, gpu_gib=110.0))
PROFILE = replace(A800, training=ROOMY)
"""Its trainer has the memory for trajectories of 38,000 tokens on few GPUs: what is tested here is
who gets how many."""
GPUS = 32
SETTINGS = PlannerSettings(groups=32)
MOVING = [name for name in PLANNERS if name not in STATIC]


@cache
def work(mean: float, overlap: float = 4.0) -> Workload:
    random = Random(1)
    lengths = (int(mean * random.lognormvariate(-0.3, 0.8)) for _ in range(128))
    return Workload(
        tuple(TrajectorySample(500, min(38_000, n + 1), 500, 4, 4.0) for n in lengths), 256, overlap
    )


@cache
def search_of(load: Workload) -> Search:
    return Search(PROFILE, load, GPUS, SETTINGS)


class Run:
    """A run on ``GPUS`` GPUs whose measurements agree with the model."""

    def __init__(self, name: str, first: Workload, profile: Profile = PROFILE) -> None:
        self.layout = first_layout(name, PROFILE, first, GPUS, SETTINGS)
        self.space = GpuPlacement.around(
            self.layout, search_of(first).training, max_len=131_072, moves=name not in STATIC
        )
        self.planner: DecisionMaker = planner_of(name, profile, self.space, SETTINGS)
        self.plan, self.slots = self.space.place(self.layout)

    def observed(self, load: Workload, step: int = 5, **more: Any) -> Observation:
        """What the model itself would measure, so that predictions are right."""
        search, layout = search_of(load), self.space.layout_of(self.plan, self.slots)
        times = search.times(layout)
        step_s = times.step_s
        measured = MeasuredStep(step_s, times.train_s, step_s - times.train_s, 0.0, 0.0)
        if not measured.starved:
            # In play as long as makes the time at saturation, proportional to it, the predicted.
            second = search.table.saturated_step_s(layout.buckets, 1.0, 100.0)
            in_play_s = times.rollout_s / second
            measured = replace(measured, in_play_s=in_play_s, concurrency=100.0)
        idle = 1 - times.rollout_s / step_s
        seen = Observation(step, self.plan, self.slots, load, measured=(measured,))
        return replace(seen, rollout_idle=idle, queue=0.5, **more)

    def play(self, means: list[float]) -> tuple[list[Layout], list[Decision]]:
        """A step for each mean length, with a look after every one."""
        layouts, decisions = [self.space.layout_of(self.plan, self.slots)], []
        for step, mean in enumerate(means):
            decision = self.planner.decide(self.observed(work(mean), step))
            if decision.plan is not None:
                self.plan, self.slots = decision.plan, decision.slots
            layouts.append(self.space.layout_of(self.plan, self.slots))
            decisions.append(decision)
        return layouts, decisions


def test_a_server_of_a_node_that_is_given_up_is_not_counted_in_any_layout() -> None:
    run, load = Run("libra", work(4000)), work(4000)
    away = {slot for slot in dict(run.plan.servers) if node_of(slot) == "node-0"}
    pins = tuple((slot, Role.ROLLOUT) for slot in away)
    seen = Observation(5, run.plan, run.slots, load, pins=pins)
    search = search_of(load)
    for gone in (frozenset[str](), frozenset({"node-0"})):
        now = replace(seen, gone=gone)
        for one in run.space.candidates(search, now):
            plan, slots = one.place()
            counted = sum(one.layout.servers.values())
            assert counted == len(plan.servers) - len(away) * len(gone)
            assert away <= dict(plan.servers).keys()
            assert plan.reasons[0] == str(run.space.layout_of(plan, slots))


def on_three_hosts() -> tuple[GpuPlacement, Observation]:
    """The trainer has the last host, the first serves, and of the second half of the GPUs do."""
    nodes = GpuNodes((("a", 8), ("b", 8), ("c", 8)))
    space = GpuPlacement.on(nodes, max_len=38_000, min_rollout=1, elastic=True)
    servers = [
        Slot(f"{node}/{gpu}x2", node, (gpu, gpu + 1), Pool.HYBRID)
        for node, gpu in (("a", 0), ("a", 2), ("a", 4), ("a", 6), ("b", 0), ("b", 2))
    ]
    base = Slot("c/base", "c", tuple(range(8)), Pool.TRAIN)
    bucket = Bucket("TP2", 2, 128, 38_000)
    plan = Plan(tuple((slot.id, bucket) for slot in servers), (base.id,))
    return space, Observation(5, plan, (*servers, base), work(9000))


def test_on_a_host_that_is_given_up_only_what_was_there_is_planned_until_it_is_back() -> None:
    space, seen = on_three_hosts()
    pins = tuple((slot.id, Role.ROLLOUT) for slot in seen.slots if slot.node == "b")
    away = replace(seen, pins=pins, gone=frozenset({"b"}))
    for now, gpus in ((away, 4), (seen, 8)):
        search = Search(PROFILE, now.workload, space.gpus, SETTINGS)
        placed = [one.place() for one in space.candidates(search, now)]
        used = set[tuple[str, int]]().union(*(tenants(*one) for one in placed))
        assert {gpu for node, gpu in used if node == "b"} == set(range(gpus))
        told = placed[0][0].reasons
        assert ("4 GPUs are left over: their host is given up" in told) == (now is away)


def test_a_new_base_group_stands_on_no_host_that_is_given_up() -> None:
    space, seen = on_three_hosts()
    pinned = PinnedSlots.of(replace(seen, gone=frozenset({"c"})), GpuNodes((("c", 8),)))
    needs = TrainerNeeds(8)
    layout = Layout((PlannedBucket(2, 4, 38_000, 128),), 16)
    for gone, node in ((pinned, "b"), (PinnedSlots(), "c")):
        (plan, _), *_ = space._placements(layout, (), gone, needs)
        assert [node_of(slot) for slot in plan.train] == [node]


def test_where_every_host_is_given_up_they_are_named() -> None:
    space, seen = on_three_hosts()
    search = Search(PROFILE, seen.workload, space.gpus, SETTINGS)
    with pytest.raises(NothingFits, match="without hosts that are given up: a, b, c"):
        list(space.candidates(search, replace(seen, gone=frozenset("abc"))))


def test_where_memory_is_unknown_a_trainer_needs_the_ranks_that_run_and_a_worker_half_of_them() -> (
    None
):
    run, load = Run("libra", work(4000)), work(4000)
    unknown = replace(ROOMY, facts=replace(A800.facts, gpu_gib=UNCHECKED_GIB))
    search = Search(replace(A800, training=unknown), load, GPUS, SETTINGS)
    (slot, *_) = run.plan.train
    for ranks, worker in ((6, 3), (5, 3)):
        base = Slot(slot, "node-3", tuple(range(8 - ranks, 8)), Pool.TRAIN)
        seen = replace(run.observed(load), slots=(base, Slot("x", "node-0", (0, 1), Pool.HYBRID)))
        seen = replace(seen, plan=replace(run.plan, train=(slot,)))
        assert run.space._needs(search, seen) == TrainerNeeds(ranks, worker)


def test_another_base_group_is_offered_beside_that_there_is_if_it_is_worth_more() -> None:
    run, load = Run("libra", work(4000)), work(4000)
    needs = TrainerNeeds(1, table=search_of(load).training)
    worth = run.space._worth(16, needs)
    assert worth > 0

    def offered(*sizes: int) -> list[list[int]]:
        held = [Slot(str(size), "node-3", tuple(range(size)), Pool.TRAIN) for size in sizes]
        kinds = run.space._bases(held, 16, needs)
        return [[sum(len(slot.gpus) for slot in base) for base in kind] for kind in kinds]

    assert offered(worth) == [[worth]]
    assert offered(worth - 1) == [[worth - 1], [worth]]
    assert offered() == [[run.space.base_gpus]]


def test_a_base_group_and_a_worker_that_contexts_outgrow_are_not_offered() -> None:
    """Of Qwen3-14B eight ranks have the memory for 15,000 tokens and a worker of three has, and
    neither for 38,000."""
    space, layout = GpuPlacement(GPUS, 8, 131_072), Layout((PlannedBucket(1, 5, 9, 128),), 27)
    plan, slots = space.place(layout)
    (worker,) = (slot.id for slot in slots if len(slot.gpus) == 3)
    assert worker in plan.gradient
    stay = []
    for tokens in (14_500, 37_500):
        load = Workload((TrajectorySample(500, tokens),), 256)
        needs = TrainerNeeds(table=Search(A800, load, GPUS, SETTINGS).training)
        placed = list(space._placements(layout, slots, PinnedSlots(), needs))
        assert placed
        bases = {each.train for each, _ in placed}
        stay.append((plan.train in bases, any(worker in each.gradient for each, _ in placed)))
    assert stay == [(True, True), (False, False)]


def test_gpus_that_are_too_few_for_a_gradient_worker_are_none() -> None:
    """One of Qwen3-14B has three or more: beside three servers of two 18 GPUs are one group."""
    search = Search(A800, work(1000), 24, SETTINGS)
    layout = Layout((PlannedBucket(2, 3, 38_000, 128),), 18)
    space = GpuPlacement.around(layout, search.training, max_len=38_000, moves=True)
    assert space.base_gpus == 18
    assert not replace(space, base_gpus=16).place(layout)[0].gradient


def test_a_steady_workload_moves_nothing() -> None:
    layouts, decisions = Run("libra", work(3000.0)).play([3000.0] * 10)
    assert len(set(layouts)) == 1
    assert all(decision.why_not for decision in decisions)


@pytest.mark.parametrize(("first", "then"), [(1000.0, 9000.0), (9000.0, 1000.0)])
def test_a_shift_moves_gpus_either_way(first: float, then: float) -> None:
    layouts, decisions = Run("libra", work(first)).play([first] * 3 + [then] * 10)
    moved = [decision for decision in decisions if decision.plan is not None]
    assert 1 <= len(moved) <= 2
    gained = layouts[-1].rollout_gpus - layouts[0].rollout_gpus
    assert gained > 0 if then > first else gained < 0
    best = search_of(work(then)).best()
    assert search_of(work(then)).times(layouts[-1]).step_s < best.times.step_s * 1.08
    assert moved[0].after.step_s < moved[0].before.step_s
    assert moved[0].payback_steps is not None


def test_a_gain_that_does_not_pay_its_moves_back_is_refused_with_numbers() -> None:
    moves = replace(PROFILE.moves, to_training_s=9e4, to_rollout_s=9e4, start_s={1: 9e4})
    run = Run("libra", work(1000), replace(PROFILE, moves=moves))
    decision = run.planner.decide(run.observed(work(9000), steps_left=50))
    assert decision.plan is None
    assert "do not pay back" in decision.why_not
    assert decision.cost_s > 1000
    assert decision.payback_steps is not None


def test_where_the_fastest_plan_does_not_pay_a_nearer_one_is_taken_that_does() -> None:
    """Servers of another shape are dear, and more of the same on GPUs from training are not."""
    dear = replace(PROFILE.moves, to_rollout_s=1.0, start_s=dict.fromkeys((1, 2, 4, 8), 9e4))
    small = Layout((PlannedBucket(1, 8, 38_000, 128),), 24)
    shapes = []
    for moves in (PROFILE.moves, dear):
        run = Run("libra", work(1000), replace(PROFILE, moves=moves))
        run.plan, run.slots = run.space.place(small)
        decision = run.planner.decide(run.observed(work(9000), steps_left=50))
        assert decision.plan is not None
        assert decision.after.step_s < decision.before.step_s
        shapes.append({bucket.tensor_parallel for _, bucket in decision.plan.servers})
    assert shapes[0] != shapes[1] == {1}


def test_where_a_restart_does_not_pay_gradient_workers_come_beside_the_base_group() -> None:
    """At any price of a restart training gets more GPUs; for nothing, in one group."""
    linked, kept = replace(ROOMY, link_bandwidth=5e9), []
    for resize_s in (0.0, 9e4):
        moves = replace(A800.moves, resize_s=resize_s)
        run = Run("libra", work(9000), replace(PROFILE, moves=moves, training=linked))
        run.plan, run.slots = run.space.place(Layout((PlannedBucket(1, 24, 38_000, 128),), 8))
        decision = run.planner.decide(run.observed(work(1000), steps_left=50))
        assert decision.plan is not None, decision.why_not
        kept.append(decision.plan.train == run.plan.train)
    assert kept == [False, True]


def test_a_run_begins_with_the_least_regret_whatever_it_gains() -> None:
    """Over the fastest plan it gains nothing."""
    run, load = Run("libra", work(4000)), work(4000)
    assert isinstance(run.planner, Planner)
    layouts = [layout for layout, _ in search_of(load).layouts()]
    fastest = min(layouts, key=lambda layout: search_of(load).times(layout).step_s)
    run.plan, run.slots = run.space.place(fastest)
    seen = Observation(0, run.plan, run.slots, load)
    decision = replace(run.planner, begins=True).decide(seen)
    chosen = run.space.layout_of(decision.proposed, decision.slots)
    candidates = list(run.space.candidates(decision.found.search, seen))
    best = least_regret([each.layout for each in candidates], PROFILE, load, GPUS, SETTINGS)
    assert decision.plan == decision.proposed
    assert chosen == best
    assert decision.explanation is not None
    assert decision.explanation.chosen.layout == str(best)


def test_a_first_plan_is_not_told_to_move_less_than_a_faster_one() -> None:
    run, load = Run("libra", work(200)), work(200)
    assert isinstance(run.planner, Planner)
    seen = Observation(0, run.plan, run.slots, load)
    explained = replace(run.planner, begins=True).decide(seen).explanation
    assert explained is not None
    second = explained.runner_up
    assert second is not None
    assert second.option.step_s < explained.chosen.step_s
    assert second.why_not.endswith("if lengths turn out otherwise, or its servers are smaller")


def test_a_run_of_mixed_servers_begins_and_stays_with_several_shapes_and_says_what_alike_take() -> (
    None
):
    mixed, load = replace(SETTINGS, shapes="mixed"), work(3000)
    layout = first_layout("libra", PROFILE, load, GPUS, mixed)
    assert len(layout.servers) > 1
    space = GpuPlacement.around(layout, search_of(load).training, max_len=131_072, moves=True)
    plan, slots = space.place(layout)
    buckets = {bucket.name: bucket for _, bucket in plan.servers}
    assert sorted(bucket.tensor_parallel for bucket in buckets.values()) == list(layout.servers)
    assert max(bucket.up_to_tokens for bucket in buckets.values()) == 131_072
    assert len({bucket.up_to_tokens for bucket in buckets.values()}) == len(buckets)
    run = Run("libra", load)
    run.plan, run.slots = plan, slots
    for mean in (3000, 300, 12_000):
        planner = Planner(space, lambda plan, evidence: PROFILE, mixed)
        decision = planner.decide(run.observed(work(mean)))
        served = {bucket.tensor_parallel for _, bucket in decision.proposed.servers}
        assert len(served) > 1
        assert decision.explanation is not None
        assert decision.explanation.shapes.startswith("mixed ")
        assert decision.explanation.shapes.endswith(" s alike")


def test_from_alike_servers_auto_goes_to_a_mixture_only_if_that_pays() -> None:
    auto, load, run = replace(SETTINGS, shapes="auto"), work(3000), Run("libra", work(3000))
    planner = Planner(run.space, lambda plan, evidence: PROFILE, auto)
    moved = planner.decide(run.observed(load))
    assert moved.plan is not None
    assert len({bucket.tensor_parallel for _, bucket in moved.plan.servers}) > 1
    assert moved.after.step_s < moved.before.step_s
    kept = replace(planner, admission=Admission(min_gain=0.5)).decide(run.observed(load))
    assert kept.plan is None
    assert kept.explanation is not None
    assert kept.explanation.shapes.startswith("alike: mixtures would gain ")


def test_near_the_end_nothing_is_moved_that_could_not_pay() -> None:
    run = Run("libra", work(1000))
    for left, moves in ((0, False), (50, True)):
        decision = run.planner.decide(run.observed(work(9000), steps_left=left))
        assert (decision.plan is not None) == moves


def test_a_gain_below_what_is_asked_for_is_refused() -> None:
    run = Run("libra", work(1000))
    assert isinstance(run.planner, Planner)
    strict = replace(run.planner, admission=Admission(min_gain=0.9))
    assert "below 90%" in strict.decide(run.observed(work(9000))).why_not


def test_costs_are_recalibrated_by_what_was_measured() -> None:
    """Rollout twice as slow as predicted gets more GPUs than the profile alone would give it."""
    run = Run("libra", load := Workload((TrajectorySample(500, 4000),), 512))
    seen = run.observed(load)
    (step,) = seen.measured
    slow = MeasuredStep(2 * step.step_s, step.train_s, step.step_s, 0.0, 0.0)
    decision = run.planner.decide(replace(seen, measured=(slow,) * 10))
    assert decision.plan is not None
    layout = run.space.layout_of(decision.plan, decision.slots)
    assert layout.rollout_gpus > run.layout.rollout_gpus
    assert decision.recalibration.rollout > 1.5


def test_of_plans_as_good_the_nearest_is_taken() -> None:
    run = Run("libra", work(1000))
    start = run.layout
    layouts, decisions = run.play([1000.0] * 2 + [9000.0])
    assert decisions[-1].plan is not None
    fresh = search_of(work(9000)).best().layout
    assert moves_between(start, layouts[-1]).gpus <= moves_between(start, fresh).gpus


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_begins_with_a_layout_that_runs(name: str) -> None:
    layout = first_layout(name, PROFILE, work(3000), GPUS, SETTINGS)
    assert layout.colocated == (name == "colocated")
    limit = 2 * GPUS if layout.colocated else GPUS
    assert layout.rollout_gpus + layout.training_gpus <= limit
    assert search_of(work(3000)).times(layout).step_s < float("inf")


@pytest.mark.parametrize(
    ("gpus", "servers", "degree"), [(6, 1, 2), (7, 1, 2), (8, 1, 4), (12, 1, 4), (16, 2, 4)]
)
def test_uniform_gives_half_of_the_gpus_to_servers_of_at_most_four(
    gpus: int, servers: int, degree: int
) -> None:
    layout = first_layout("uniform", PROFILE, work(1000), gpus, SETTINGS)
    (bucket,) = layout.buckets
    assert (bucket.servers, bucket.tensor_parallel) == (servers, degree)
    assert layout.rollout_gpus + layout.training_gpus <= gpus


@pytest.mark.parametrize("name", MOVING)
def test_every_layout_a_planner_moves_to_runs(name: str) -> None:
    means = [1000.0] * 3 + [9000.0] * 8 + [1500.0] * 8
    run = Run(name, work(means[0]))
    layouts, _ = run.play(means)
    for layout, mean in zip(layouts[1:], means, strict=True):
        assert search_of(work(mean)).times(layout).step_s < float("inf")
    assert len(set(layouts)) > 1


@pytest.mark.parametrize("name", ["greedy", "streamrl", "dynarl"])
def test_a_rule_gives_the_starving_half_more(name: str) -> None:
    layouts, _ = Run(name, work(1000.0)).play([1000.0] * 2 + [9000.0] * 15)
    assert layouts[-1].rollout_gpus > layouts[0].rollout_gpus
    assert len(layouts[-1].buckets) == 1, "equal servers"


@pytest.mark.parametrize("name", ["greedy", "streamrl", "dynarl"])
def test_a_rule_begins_and_rests_as_libra_does(name: str) -> None:
    run = Run(name, work(1000.0))
    assert run.layout == first_layout("libra", PROFILE, work(1000.0), GPUS, SETTINGS)
    _, decisions = run.play([9000.0, 1000.0] * 8)
    moved = [step for step, decision in enumerate(decisions) if decision.plan is not None]
    assert moved
    assert all(then - step >= COOLDOWN for step, then in pairwise(moved))


def test_dynarl_needs_pressure_to_take_from_training() -> None:
    run = Run("dynarl", work(1000))
    seen = run.observed(work(9000))
    assert run.planner.decide(replace(seen, queue=0.0, rollout_idle=0.5)).plan is None
    assert run.planner.decide(replace(seen, queue=0.9, rollout_idle=0.0)).plan is not None


def test_a_rule_stays_until_something_is_measured_under_its_plan() -> None:
    run = Run("dynarl", work(1000))
    decision = run.planner.decide(replace(run.observed(work(9000)), measured=()))
    assert decision.plan is None
    assert "nothing is measured" in decision.why_not


def test_an_unknown_planner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlannerError) as error:
        first_layout("oracle", PROFILE, work(1000), GPUS, SETTINGS)
    assert "libra" in error.value.hint


# -- which GPU does what ---------------------------------------------------------------------------


def tenants(plan: Plan, slots: tuple[Slot, ...]) -> Counter[tuple[str, int]]:
    used = {*dict(plan.servers), *plan.train, *plan.gradient}
    return Counter(chain.from_iterable(gpus_of([slot]) for slot in slots if slot.id in used))


@settings(max_examples=60)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=6))
def test_no_gpu_has_two_tenants_and_the_base_group_stays(wanted: list[tuple[int, ...]]) -> None:
    """From any servers to any others, on nodes of eight GPUs of which the last trains."""
    space = GpuPlacement(40, 8, 1, 131_072)
    slots: tuple[Slot, ...] = ()
    base = None
    for counts in wanted:
        numbers = dict(zip((1, 2, 4, 8), counts, strict=True))
        while sum(degree * number for degree, number in numbers.items()) > 32:
            numbers[8] -= 1
        buckets = tuple(PlannedBucket(d, n, 1000, 64) for d, n in numbers.items() if n > 0)
        if not buckets:
            continue
        plan, slots = space.place(Layout(buckets, 1), slots)
        assert set(tenants(plan, slots).values()) == {1}
        assert set(tenants(plan, slots)) == {(f"node-{n // 8}", n % 8) for n in range(40)}, (
            "what is left trains"
        )
        base = base or plan.train
        assert plan.train == base


def test_a_placement_that_keeps_its_servers_keeps_their_gpus_and_workers() -> None:
    space = GpuPlacement(32, 8, 1, 131_072)
    four = Layout((PlannedBucket(2, 4, 1000, 64),), 24)
    five = Layout((PlannedBucket(2, 5, 1000, 64),), 22)
    plan, slots = space.place(four)
    again, more = space.place(five, slots)
    assert {slot for slot, _ in plan.servers} < {slot for slot, _ in again.servers}
    assert set(plan.gradient) & set(again.gradient), "a node without servers keeps its worker"
    assert len(more) >= len(again.servers)
