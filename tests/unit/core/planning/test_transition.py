"""What moving from one layout to another costs the job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.core.costs.profile import MoveCost
from libra_cli.core.model_use import ModelDemand
from libra_cli.core.observation import Observation
from libra_cli.core.planning.gpu_placement import GpuPlacement
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.planning.transition import Staying, moves_between, moves_cost_s, what_stays
from libra_cli.core.reconcile.reconciler import GRACE_S
from libra_cli.core.types import Bucket, Plan, Pool, Slot
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile

MOVES = MoveCost(
    to_training_s=60.0, to_rollout_s=40.0, resize_s=90.0, start_s=dict.fromkeys((1, 2, 4, 8), 80.0)
)
PROFILE = replace(load_profile("a800-qwen3-14b"), moves=MOVES)
WORK = Workload(tuple(TrajectorySample(500, n, 500, 4, 4.0) for n in (400, 800, 3000)), 256, 2.0)
SEARCH = Search(PROFILE, WORK, 24, PlannerSettings())


def layout(training: int, *servers: tuple[int, int], workers: tuple[int, ...] = ()) -> Layout:
    buckets = (PlannedBucket(degree, number, 3000, 64) for degree, number in servers)
    return Layout(tuple(buckets), training, workers=workers)


def paced(seconds: float, meanwhile: Layout, then: Layout) -> float:
    """Seconds lost by having the pace of one layout in place of another's for so long."""
    return seconds * (1 - SEARCH.times(then).step_s / SEARCH.times(meanwhile).step_s)


def anew_s(today: Layout, share: float, degree: int, servers: int) -> float:
    """Seconds in which servers prefill that share of the trajectories again, half grown: of those
    in flight whose groups are still played, for others wait for training or are in it."""
    times = SEARCH.times(today)
    steps = WORK.overlap - times.train_s / times.step_s - WORK.ready
    tokens = share * steps * WORK.trajectories * WORK.mean_context / 2
    return tokens * PROFILE.servers[degree].linear().prefill_token_s / servers


def test_moves_are_the_difference_of_two_layouts() -> None:
    today = layout(16, (1, 8), (4, 2))
    then = layout(20, (1, 4), (8, 1))
    moves = moves_between(today, then)
    assert (moves.to_training, moves.to_rollout) == (4, 0)
    assert moves.stopped == {1: 4, 4: 2}
    assert moves.started == {8: 1}
    assert moves.gpus == 12
    assert moves_between(today, today).gpus == 0
    assert moves_cost_s(SEARCH, today, today) == 0


def test_servers_that_become_workers_cost_the_pace_of_those_that_stay() -> None:
    today, then = layout(16, (1, 8)), layout(20, (1, 4), workers=(4,))
    lost_s = paced(60.0, layout(16, (1, 4)), then)
    assert lost_s > 1
    assert moves_cost_s(SEARCH, today, then) == pytest.approx(lost_s + anew_s(today, 0.5, 1, 4))


def test_gpus_that_come_from_training_cost_the_pace_of_those_that_stay_until_they_serve() -> None:
    today, then = layout(20, (2, 2)), layout(16, (2, 4))
    lost_s = paced(40.0, layout(16, (2, 2)), then)
    assert moves_cost_s(SEARCH, today, then) == pytest.approx(lost_s)
    later_s = paced(45.0, layout(16, (2, 2)), then)
    assert moves_cost_s(SEARCH, today, then, step_end_s=5.0) == pytest.approx(later_s)


def test_one_server_stays_until_another_serves_beside_it() -> None:
    today, then = layout(16, (4, 2)), layout(16, (2, 4))
    lost_s = paced(80.0 + GRACE_S, layout(16, (4, 1)), then)
    assert moves_cost_s(SEARCH, today, then) == pytest.approx(lost_s + anew_s(today, 1.0, 2, 4))


def test_rollout_stands_still_where_the_next_server_needs_the_gpus_of_all() -> None:
    today, then = layout(16, (4, 2)), layout(16, (8, 1))
    still_s = 80.0 + GRACE_S
    assert moves_cost_s(SEARCH, today, then) == pytest.approx(still_s + anew_s(today, 1.0, 8, 1))


def test_gpus_of_the_last_server_train_once_another_serves() -> None:
    today, then = layout(12, (4, 3)), layout(16, (8, 1), workers=(4,))
    lost_s = paced(80.0 + GRACE_S, layout(12, (4, 1)), then)
    lost_s += paced(60.0, layout(12, (8, 1)), then)
    assert moves_cost_s(SEARCH, today, then) == pytest.approx(lost_s + anew_s(today, 1.0, 8, 1))


def test_a_restart_stands_for_all_of_itself_and_what_moves_meanwhile_is_free() -> None:
    today, then = layout(16, (1, 8)), layout(20, (1, 4))
    cost_s = moves_cost_s(SEARCH, today, then, restart_s=90.0)
    assert cost_s == pytest.approx(90.0 + anew_s(today, 0.5, 1, 4))
    replaced = layout(16, (4, 2))
    rest_s = paced(80.0 + GRACE_S - 50.0, layout(16, (1, 1)), replaced)
    cost_s = moves_cost_s(SEARCH, today, replaced, restart_s=50.0)
    assert cost_s == pytest.approx(50.0 + rest_s + anew_s(today, 1.0, 4, 2))


def test_what_is_faster_meanwhile_than_then_costs_nothing() -> None:
    slow = layout(4, (1, 4))
    assert moves_cost_s(SEARCH, layout(16, (1, 4)), slow) == 0


def test_a_restart_waits_for_the_last_server_where_its_gpus_are_to_train() -> None:
    today, then = layout(12, (4, 3)), layout(16, (8, 1))
    lost_s = paced(80.0 + GRACE_S, layout(12, (4, 1)), then) + 90.0
    cost_s = moves_cost_s(SEARCH, today, then, restart_s=90.0)
    assert cost_s == pytest.approx(lost_s + anew_s(today, 1.0, 8, 1))


def slot(name: str, node: str, gpus: tuple[int, ...]) -> Slot:
    return Slot(name, node, gpus, Pool.HYBRID)


SHORT, LONG = Bucket("short", 2, 64, 1000), Bucket("long", 2, 64, 9000)
WIDE = Bucket("wide", 4, 64, 9000)
SPACE = GpuPlacement(16, 2, 9000)
BEFORE = (
    slot("a", "n", (0, 1)),
    slot("b", "n", (2, 3)),
    slot("c", "n", (4, 5)),
    slot("t", "m", (0, 1)),
    slot("g", "m", (2, 3)),
    slot("h", "m", (4, 5, 6, 7)),
)
SERVED = (("a", SHORT), ("b", SHORT), ("c", SHORT))


def staying(then: Plan, *new: Slot, today: Plan | None = None) -> Staying:
    plan = today or Plan(SERVED, ("t",), gradient=("g", "h"))
    return what_stays(SPACE.layout_of, Observation(1, plan, BEFORE, WORK), then, (*BEFORE, *new))


def test_what_stays_are_servers_of_both_plans_and_ranks_of_both() -> None:
    stays = staying(Plan((("a", LONG), ("c", WIDE)), ("t",), gradient=("h",)))
    assert (stays.layout.servers, stays.last) == ({2: 1}, ())
    assert (stays.layout.training_gpus, stays.layout.workers) == (6, (4,))


def test_what_stays_on_a_node_that_is_given_up_does_not_work() -> None:
    plan = Plan(SERVED, ("t",), gradient=("g", "h"))
    slots = tuple(replace(one, node="k") if one.id in ("b", "h") else one for one in BEFORE)
    now = Observation(1, plan, slots, WORK, gone=frozenset({"k"}))
    stays = what_stays(SPACE.layout_of, now, replace(plan, gradient=("h",)), slots)
    assert stays.layout.servers == {2: 2}
    assert (stays.layout.training_gpus, stays.layout.workers) == (2, ())
    assert not stays.replacing, "nothing starts there either"


def test_a_worker_that_is_cut_up_does_not_stay() -> None:
    left = slot("less", "m", (4, 5))
    stays = staying(Plan(SERVED, ("t",), gradient=("g", "less")), left)
    assert (stays.layout.training_gpus, stays.layout.workers) == (4, (2,))


def test_of_a_core_that_is_another_slot_its_gpus_stay() -> None:
    core = slot("all", "m", (0, 1, 2, 3))
    stays = staying(Plan(SERVED, ("all",), gradient=("h",)), core)
    assert (stays.layout.training_gpus, stays.layout.workers) == (6, (4,))


@pytest.mark.parametrize(
    ("gpus", "serves"), [((0, 1, 2, 3), True), ((2, 3, 4, 5), True), ((0, 1, 2, 3, 4, 5), False)]
)
def test_the_last_server_serves_on_if_the_next_one_does_not_need_its_gpus(
    gpus: tuple[int, ...], serves: bool
) -> None:
    wide = slot("w", "n", gpus)
    stays = staying(Plan((("w", WIDE),), ("t",), gradient=("g", "h")), wide)
    assert stays.layout.servers == {}
    assert [bucket.servers for bucket in stays.serving] == [1] * serves


def test_what_comes_from_the_core_is_no_server_that_the_last_one_waits_for() -> None:
    today = Plan(SERVED, ("t", "h"), gradient=("g",))
    stays = staying(Plan((("h", WIDE),), ("t",), gradient=("g", "a")), today=today)
    assert stays.serving == ()
    from_worker = staying(Plan((("h", WIDE),), ("t",), gradient=("g", "a")))
    assert [bucket.servers for bucket in from_worker.serving] == [1]


def test_a_server_on_gpus_of_the_core_is_none_whatever_its_slot_is_called() -> None:
    wide, rest = slot("w", "m", (0, 4, 5, 6)), slot("x", "n", (0, 1, 2, 3))
    today = Plan(SERVED, ("t", "h"), gradient=("g",))
    then = Plan((("w", WIDE),), ("g", "x"))
    stays = staying(then, wide, rest, today=today)
    assert (stays.serving, stays.from_core) == ((), frozenset({4}))


def test_workers_that_replace_others_train_as_soon_as_they_have_come() -> None:
    today, then = layout(16, (2, 4), workers=(4,)), layout(16, (2, 4), workers=(4,))
    stays = Staying(layout(12, (2, 2)), from_workers=frozenset({2}))
    lost_s = paced(60.0, layout(12, (2, 2)), then) + paced(20.0, layout(16, (2, 2)), then)
    cost_s = moves_cost_s(SEARCH, today, then, stays, step_end_s=40.0)
    assert cost_s == pytest.approx(lost_s + anew_s(today, 0.5, 2, 4), rel=1e-3)


def test_what_comes_from_a_core_starts_while_that_restarts() -> None:
    today, then = layout(16, (2, 2)), layout(12, (2, 2), workers=(4,))
    stays = Staying(layout(8), from_core=frozenset({2}), cut_from_core=True)
    cost_s = moves_cost_s(SEARCH, today, then, stays, restart_s=90.0, step_end_s=5.0)
    assert cost_s == pytest.approx(90.0 + anew_s(today, 1.0, 2, 2))
    quick_s = moves_cost_s(SEARCH, today, then, stays, restart_s=30.0, step_end_s=5.0)
    lost_s = 45.0 + paced(20.0, layout(8, (2, 2)), then)
    assert quick_s == pytest.approx(lost_s + anew_s(today, 1.0, 2, 2))


def test_what_comes_from_a_core_that_waits_for_the_last_server_frees_nobody() -> None:
    today, then = layout(16, (8, 1)), layout(12, (4, 1), (2, 2))
    last = (PlannedBucket(8, 1, 3000, 64),)
    stays = Staying(
        layout(8), last, core_waits=True, replacing=frozenset({2}), from_core=frozenset({4})
    )
    cost_s = moves_cost_s(SEARCH, today, then, stays, restart_s=90.0, step_end_s=5.0)
    lost_s = paced(80.0 + GRACE_S, layout(16, (8, 1)), then) + 90.0
    again_s = 1 / (1 / anew_s(today, 1.0, 4, 1) + 1 / anew_s(today, 1.0, 2, 2))
    assert cost_s == pytest.approx(lost_s + again_s)


def test_a_restart_waits_for_no_server_whose_gpus_the_core_does_not_need() -> None:
    today, then = layout(12, (4, 3), workers=(4,)), layout(12, (2, 6))
    stays = Staying(layout(8), (PlannedBucket(4, 1, 3000, 64),), replacing=frozenset({2}))
    lost_s = 90.0 + paced(80.0 + GRACE_S - 90.0, layout(12, (4, 1)), then)
    cost_s = moves_cost_s(SEARCH, today, then, stays, restart_s=90.0)
    assert cost_s == pytest.approx(lost_s + anew_s(today, 1.0, 2, 6))


def test_workers_that_go_do_not_train_until_the_core_restarts() -> None:
    today, then = layout(16, (8, 1), workers=(8,)), layout(16, (4, 2))
    last = (PlannedBucket(8, 1, 3000, 64),)
    stays = Staying(layout(8), last, core_waits=True, from_workers=frozenset({4}))
    cost_s = moves_cost_s(SEARCH, today, then, stays, restart_s=90.0)
    lost_s = 90.0 + paced(40.0, layout(8, (8, 1)), then)
    assert cost_s == pytest.approx(lost_s + anew_s(today, 1.0, 4, 2))


def test_servers_of_frozen_models_work_when_they_have_started() -> None:
    judged = replace(WORK, models=(ModelDemand("judge", 1, 300.0, 300.0, 1.0),))
    search = Search(PROFILE, judged, 24, PlannerSettings())
    one, three = (
        replace(layout(12, servers), models=(("judge", judges),))
        for servers, judges in (((2, 6), 1), ((2, 5), 3))
    )
    assert search.times(one).step_s > 2 * search.times(three).step_s
    cost_s = moves_cost_s(search, one, three)
    share = 1 - search.times(three).step_s / search.times(one).step_s
    assert cost_s == pytest.approx((80.0 + GRACE_S) * share, rel=0.05)


def test_what_is_in_flight_is_prefilled_again_and_not_what_comes() -> None:
    today, then = layout(16, (1, 8)), layout(20, (1, 4), workers=(4,))
    longer = WORK.stretched(2.0)
    apart_s = moves_cost_s(SEARCH, today, then, playing=longer) - moves_cost_s(SEARCH, today, then)
    assert apart_s > 0.5 * anew_s(today, 0.5, 1, 4)
