"""What is counted of frozen models, what of it a step tells, and what it is worth to a plan."""

from __future__ import annotations

import pytest

from libra_cli.core.model_use import (
    AskedModels,
    CountedUse,
    ModelDemand,
    ModelUse,
    ModelUses,
    demands,
    uses_of,
)
from libra_cli.core.workload import TrajectorySample, Workload


def test_a_step_tells_what_was_asked_since_the_one_before() -> None:
    book = ModelUses()
    assert book.take_metrics() == {}
    book.saw([ModelUse("judge", 1, 10.0, 40.0), ModelUse("customer", 2, 1.0, 1.0)])
    first = book.take_metrics()
    assert uses_of(first) == (
        ModelUse("customer", 2, 1.0, 1.0),
        ModelUse("judge", 1, 10.0, 40.0),
    )
    book.saw([ModelUse("judge", 2, 25.0, 100.0)])
    assert uses_of(book.take_metrics()) == (
        ModelUse("customer", 2, 0.0, 0.0),
        ModelUse("judge", 2, 15.0, 60.0),
    )


def test_counts_of_the_next_controller_begin_anew() -> None:
    book = ModelUses()
    book.saw([ModelUse("judge", 1, 100.0, 400.0)])
    book.take_metrics()
    book.saw([ModelUse("judge", 1, 3.0, 12.0)])
    assert uses_of(book.take_metrics()) == (ModelUse("judge", 1, 3.0, 12.0),)


def test_other_metrics_are_no_use_of_a_model() -> None:
    assert uses_of({"reward_std": 1.0, "places_full_s": 2.0}) == ()


def test_a_demand_is_what_a_trajectory_asks_and_how_busy_todays_servers_were() -> None:
    before = CountedUse(10.0, 2, (ModelUse("judge", 1, 10.0, 50.0),))
    now = CountedUse(20.0, 4, (ModelUse("judge", 2, 20.0, 24.0),))
    (demand,) = demands([before, now], [now], trajectories=12)
    assert demand == ModelDemand("judge", 2.0, busy_s=60.0, asked_s=72.0, busy=0.5)
    assert demands([], [], 12) == ()
    assert demands([CountedUse(5.0, 3, ())], [CountedUse(5.0, 3, ())], 12) == ()


def test_where_nothing_has_ended_nothing_is_told() -> None:
    none = CountedUse(10.0, 0, (ModelUse("judge", 1, 10.0, 50.0),))
    some = CountedUse(10.0, 5, (ModelUse("judge", 1, 10.0, 50.0),))
    assert demands([none], [none], 12) == ()
    (demand,) = demands([some, none], [none], 10)
    assert (demand.busy_s, demand.asked_s) == (40.0, 200.0)
    (demand,) = demands([none], [some], 10)  # after a sudden change of the work
    assert (demand.busy_s, demand.asked_s) == (20.0, 100.0)


def use(
    busy_s: float, asked_s: float, servers: int = 1, opened: int = 0, answered: int = 0
) -> tuple[ModelUse, ...]:
    return (ModelUse("judge", servers, busy_s, asked_s, opened, answered),)


def test_what_a_trajectory_asks_is_known_under_every_plan() -> None:
    asked = AskedModels(20)
    assert asked.demands(20, 8) == ()
    for _ in range(4):
        asked.ended()
    asked.step(10.0, use(8.0, 40.0), is_planned=True)
    before = asked.demands(20, 8)
    assert before == (ModelDemand("judge", 1.0, 16.0, 80.0, busy=0.8),)
    asked.new_plan()
    assert asked.demands(20, 8) == before
    for _ in range(2):
        asked.ended()
    asked.step(10.0, use(4.0, 5.0, servers=2), is_planned=False)  # it began before the plan
    assert asked.demands(20, 8) == (ModelDemand("judge", 1.0, 16.0, 80.0, busy=0.8),)
    asked.ended()
    asked.step(10.0, use(2.0, 3.0, servers=2), is_planned=True)
    assert asked.demands(20, 7) == (ModelDemand("judge", 2.0, 14.0, 21.0, busy=0.1),)


def test_a_first_step_that_began_before_the_plan_tells_too() -> None:
    asked = AskedModels(20)
    asked.new_plan()
    asked.ended()
    asked.step(10.0, use(5.0, 6.0), is_planned=False)
    assert asked.demands(20, 2) == (ModelDemand("judge", 1.0, 10.0, 12.0, busy=0.5),)


def test_before_the_first_step_those_under_way_count_by_what_they_have_asked() -> None:
    asked = AskedModels(20)
    halves = [0.5] * 20
    assert asked.first_demands(use(0.0, 0.0), 60.0, [], 10) == ()
    for _ in range(10):
        asked.ended()
    # Asked all along, as a customer is: ten have ended and twenty are half-way.
    (customer,) = asked.first_demands(use(20.0, 20.0, answered=40), 60.0, halves, 10)
    assert customer.busy_s == 10.0
    assert customer.busy == pytest.approx(20 / 60)
    # Asked at the end, as a judge is: all that are under way wait for it, or only half of them.
    waits = use(40.0, 800.0, servers=2, opened=20, answered=10)
    (judge,) = asked.first_demands(waits, 60.0, [1.0] * 20, 10)
    assert (judge.busy_s, judge.busy) == (40.0, 1.0)
    (judge,) = asked.first_demands(waits, 60.0, [1.0] * 20 + [0.1] * 20, 10)
    assert judge.busy_s == pytest.approx(37.5)
    # Nobody has an answer yet.
    assert asked.first_demands(use(40.0, 800.0, opened=20), 60.0, [1.0] * 20, 10) == ()
    asked.begin()
    assert asked.first_demands(use(1.0, 1.0), 60.0, [], 10) == ()


def test_as_many_open_requests_are_the_last_as_answers_ended_a_trajectory() -> None:
    asked = AskedModels(20)
    customer = ModelUse("customer", 1, 9.0, 9.0, open=30, answered=60)
    judge = ModelUse("judge", 1, 9.0, 9.0, open=20, answered=12)
    assert asked.last_asked([customer, judge]) == 0
    for _ in range(12):
        asked.ended()
    assert asked.last_asked([customer]) == 6  # 12 of 60 answers
    assert asked.last_asked([customer, judge]) == 20
    # Equal questions are asked once: an answer ends three trajectories.
    assert asked.last_asked([ModelUse("judge", 1, 9.0, 9.0, open=20, answered=4)]) == 60
    assert asked.last_asked([ModelUse("judge", 1, 9.0, 9.0, open=20)]) == 0
    asked.step(10.0, (), is_planned=True)
    assert asked.last_asked([judge]) == 20, "a step changes nothing of what the run has told"
    asked.begin()
    assert asked.last_asked([judge]) == 0


def test_what_was_counted_before_the_first_step_is_told_at_any_time() -> None:
    book = ModelUses()
    book.saw([ModelUse("judge", 1, 10.0, 40.0)])
    assert book.since_step == (ModelUse("judge", 1, 10.0, 40.0),)
    book.take_metrics()
    assert book.since_step == (ModelUse("judge", 1, 0.0, 0.0),)
    assert book.since_begin == (ModelUse("judge", 1, 10.0, 40.0),)


def test_more_servers_share_what_is_asked() -> None:
    judge = ModelDemand("judge", 2.0, 60.0, 400.0, busy=1.0)
    assert [judge.step_s(servers) for servers in (1, 2, 3)] == [60.0, 30.0, 20.0]
    assert judge.step_s(0) == float("inf")
    assert judge.saved_s(2) == 0.0
    assert judge.saved_s(4) == 200.0
    assert judge.saved_s(1) == -400.0
    assert ModelDemand("judge", 1.0, 0.0, 0.0, busy=0.0).step_s(0) == 0.0


@pytest.mark.parametrize(("servers", "tool_s"), [(2, 5.0), (4, 3.0), (1, 9.0), (40, 1.2)])
def test_trajectories_wait_less_in_tools_where_a_model_has_more_servers(
    servers: int, tool_s: float
) -> None:
    judge = ModelDemand("judge", 2.0, 60.0, 400.0, busy=1.0)
    work = Workload((TrajectorySample(10, 20, tool_s=5.0),), 100, models=(judge,))
    (sample,) = work.served_by({"judge": servers}).samples
    assert sample.tool_s == pytest.approx(tool_s)
    assert work.served_by({"another": 3}) is work
