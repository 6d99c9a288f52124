"""What moving from one layout to another costs the job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.core.costs.profile import MoveCost
from libra_cli.core.observation import Observation
from libra_cli.core.planning.gpu_placement import GpuPlacement
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.planning.transition import layout_that_stays, moves_between, moves_cost_s
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


def prefilled_s(share: float, degree: int, servers: int) -> float:
    """Seconds in which servers prefill that share of the trajectories again, half grown."""
    tokens = share * WORK.trajectories * WORK.mean_context / 2
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
    assert moves_cost_s(SEARCH, today, then) == pytest.approx(lost_s + prefilled_s(0.5, 1, 4))


def test_gpus_that_come_from_training_cost_the_pace_of_those_that_stay_until_they_serve() -> None:
    today, then = layout(20, (2, 2)), layout(16, (2, 4))
    lost_s = paced(40.0, layout(16, (2, 2)), then)
    assert moves_cost_s(SEARCH, today, then) == pytest.approx(lost_s)
    later_s = paced(45.0, layout(16, (2, 2)), then)
    assert moves_cost_s(SEARCH, today, then, step_end_s=5.0) == pytest.approx(later_s)


def test_one_server_stays_until_another_serves() -> None:
    today, then = layout(16, (4, 2)), layout(16, (8, 1))
    lost_s = paced(80.0 + GRACE_S, layout(16, (4, 1)), then)
    assert moves_cost_s(SEARCH, today, then) == pytest.approx(lost_s + prefilled_s(1.0, 8, 1))


def test_gpus_of_the_last_server_train_once_another_serves() -> None:
    today, then = layout(12, (4, 3)), layout(16, (8, 1), workers=(4,))
    lost_s = paced(80.0 + GRACE_S, layout(12, (4, 1)), then)
    lost_s += paced(60.0, layout(12, (8, 1)), then)
    assert moves_cost_s(SEARCH, today, then) == pytest.approx(lost_s + prefilled_s(1.0, 8, 1))


def test_a_restart_stands_for_all_of_itself_and_what_moves_meanwhile_is_free() -> None:
    today, then = layout(16, (1, 8)), layout(20, (1, 4))
    cost_s = moves_cost_s(SEARCH, today, then, restart_s=90.0)
    assert cost_s == pytest.approx(90.0 + prefilled_s(0.5, 1, 4))
    replaced = layout(16, (4, 2))
    rest_s = paced(80.0 + GRACE_S - 50.0, layout(16, (1, 1)), replaced)
    cost_s = moves_cost_s(SEARCH, today, replaced, restart_s=50.0)
    assert cost_s == pytest.approx(50.0 + rest_s + prefilled_s(1.0, 4, 2))


def test_what_is_faster_meanwhile_than_then_costs_nothing() -> None:
    slow = layout(4, (1, 4))
    assert moves_cost_s(SEARCH, layout(16, (1, 4)), slow) == 0


def test_a_restart_waits_for_the_last_server_where_its_gpus_are_to_train() -> None:
    today, then = layout(12, (4, 3)), layout(16, (8, 1))
    lost_s = paced(80.0 + GRACE_S, layout(12, (4, 1)), then) + 90.0
    cost_s = moves_cost_s(SEARCH, today, then, restart_s=90.0)
    assert cost_s == pytest.approx(lost_s + prefilled_s(1.0, 8, 1))


def slot(name: str, node: str, gpus: tuple[int, ...]) -> Slot:
    return Slot(name, node, gpus, Pool.HYBRID)


def test_what_stays_are_servers_of_both_plans_and_gpus_that_train_under_both() -> None:
    short, long = Bucket("short", 2, 64, 1000), Bucket("long", 2, 64, 9000)
    wide = Bucket("wide", 4, 64, 9000)
    before = [slot("a", "n", (0, 1)), slot("b", "n", (2, 3)), slot("c", "n", (4, 5))]
    before += [slot("t", "m", (0, 1)), slot("g", "m", (2, 3)), slot("h", "m", (4, 5))]
    after = [*before[:1], slot("d", "n", (2, 3, 4, 5)), slot("all", "m", (0, 1, 2, 3))]
    after += [slot("h", "m", (4, 5))]
    today = Plan((("a", short), ("b", short), ("c", short)), ("t",), gradient=("g", "h"))
    then = Plan((("a", long), ("d", wide)), ("all",), gradient=("h",))
    now = Observation(1, today, tuple(before), WORK)
    space = GpuPlacement(16, 2, 9000)
    stays = layout_that_stays(space.layout_of, now, then, after)
    assert stays == replace(layout(6, (2, 1), workers=(2,)), buckets=stays.buckets)
    assert stays.servers == {2: 1}
