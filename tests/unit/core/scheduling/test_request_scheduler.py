"""The request scheduler, and libra's own policy."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.scheduling.baselines import (
    AttainedService,
    DynaRL,
    Heddle,
    RoundRobin,
    SiblingHistory,
    StickyLeastLoaded,
    StreamRL,
)
from libra_cli.core.scheduling.least_cost import KV_SHARE, LeastExpectedCost
from libra_cli.core.scheduling.policy import POLICIES, SchedulingPolicy
from libra_cli.core.scheduling.request_scheduler import (
    BEGIN_PATIENCE_S,
    EVALUATION_PATIENCE_S,
    RequestScheduler,
)
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import EVALUATION_GROUPS, Bucket, TrajectoryId, WeightVersion
from libra_cli.plugins.finding import find
from tests.sim_scene import COSTS

KEY = WeightVersion(1, 0)


def server(slot: str, degree: int = 1, *, seats: int = 2, kv: int = 12_000) -> ServerQueue:
    cost = replace(COSTS[degree], kv_tokens=kv)
    return ServerQueue(slot, Bucket(f"TP{degree}", degree, seats, 400 * 4**degree), cost, KEY)


def request(number: int, *, turn: int = 100, context: int = 500, **more: object) -> Request:
    fields: dict[str, object] = {
        "trajectory": TrajectoryId(number, 0),
        "context": context,
        "generated": turn,
        "turns": 1,
        "tools": 1,
        "waiting_since": 0.0,
        "last_slot": None,
        "last_key": None,
    }
    return Request(**{**fields, **more})  # type: ignore[arg-type]


def scheduler(*queues: ServerQueue, policy: SchedulingPolicy | None = None) -> RequestScheduler:
    made = RequestScheduler(policy or LeastExpectedCost())
    made.refresh(queues, latest=KEY, now=0.0)
    return made


def sent(made: RequestScheduler, now: float = 0.0) -> dict[int, str]:
    placed = {one.trajectory.group: queue.slot for one, queue in made.dispatch(now=now)}
    made.check()
    return placed


def test_what_has_nowhere_to_stay_goes_to_the_fast_server() -> None:
    made = scheduler(server("slow", 1), server("fast", 4))
    made.submit(request(1), now=0.0)
    assert sent(made) == {1: "fast"}


def test_a_request_stays_with_its_prefix_cache_unless_moving_gains_more_than_it_costs() -> None:
    queued = {"last_slot": "slow", "last_key": KEY}
    made = scheduler(server("slow", 1, kv=100_000), server("fast", 4, kv=100_000))
    made.submit(request(1, turn=5, context=9_000, **queued), now=0.0)
    made.submit(request(2, turn=4000, context=500, **queued), now=0.0)
    assert sent(made) == {1: "slow", 2: "fast"}


def test_a_prefix_of_other_weights_holds_nobody() -> None:
    made = scheduler(server("slow", 1), server("fast", 4))
    made.submit(
        request(1, turn=20, context=9_000, last_slot="slow", last_key=WeightVersion(1, -1)), now=0.0
    )
    assert sent(made) == {1: "fast"}


def test_what_would_outgrow_a_server_goes_where_it_fits() -> None:
    made = scheduler(server("small", 4, kv=1_000), server("large", 1, kv=50_000))
    made.submit(request(1, turn=900, context=800), now=0.0)
    assert sent(made) == {1: "large"}


@pytest.mark.parametrize("others", [0, 3])
def test_a_prefill_is_charged_for_each_request_that_it_delays(others: int) -> None:
    queue, policy = server("a", seats=9), LeastExpectedCost()
    for number in range(others):
        queue.enter(request(number))
    cached = request(9, last_slot="a", last_key=KEY)
    prefill_s = policy.cost(request(9), queue) - policy.cost(cached, queue)
    assert prefill_s == pytest.approx((1 + others) * queue.cost.prefill_s(500, 0))


@pytest.mark.parametrize(("turn", "fits"), [(100, True), (101, False)])
def test_a_server_admits_what_it_has_room_for_after_the_next_turn(turn: int, fits: bool) -> None:
    queue = server("a", kv=round(1_100 / KV_SHARE))
    queue.enter(request(1, context=500))
    assert LeastExpectedCost().admits(request(2, turn=turn, context=500), queue) is fits


@pytest.mark.parametrize(("contexts", "room"), [(1_000, True), (1_001, False)])
def test_half_of_the_caches_is_for_contexts_between_turns(contexts: int, room: bool) -> None:
    made = scheduler(server("a", 4, kv=500), server("b", 4, kv=1_500))
    assert LeastExpectedCost().has_room(contexts, made.queues) is room


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_request_that_comes_back_waits_by_its_new_rank(meanwhile: bool) -> None:
    queue, other = server("a"), request(2)
    queue.enqueue(request(1), rank=1.0, order=1)
    if meanwhile:
        queue.enqueue(other, rank=2.0, order=2)
    queue.enter(request(1))
    queue.leave(TrajectoryId(1, 0))
    if not meanwhile:
        queue.enqueue(other, rank=2.0, order=2)
    queue.enqueue(request(1), rank=3.0, order=3)
    assert queue.head() == other


def test_a_queue_that_a_request_was_taken_from_is_priced_as_before() -> None:
    queue = server("a")
    queue.enter(request(1))
    before = (queue.num_requests, queue.next_step_s, queue.load)
    queue.enqueue(request(2), rank=2.0, order=1)
    assert (queue.num_requests, queue.load) == (2, 1.0)
    queue.dequeue(TrajectoryId(2, 0))
    assert (queue.num_requests, queue.next_step_s, queue.load) == before


def test_admission_stops_at_the_seats_and_at_the_kv_budget() -> None:
    made = scheduler(server("only", seats=2, kv=2_000))
    for number in range(3):
        made.submit(request(number, context=700), now=0.0)
    assert sent(made) == {0: "only", 1: "only"}
    made.left(TrajectoryId(0, 0))
    made.submit(request(9, context=100), now=0.0)
    assert set(sent(made)) == {2}, "the smaller one that came later does not pass"


def test_an_empty_server_takes_even_what_exceeds_its_budget() -> None:
    made = scheduler(server("only", kv=600))
    made.submit(request(1, context=5_000), now=0.0)
    assert sent(made) == {1: "only"}


def test_older_groups_leave_first() -> None:
    made = scheduler(server("only", seats=1))
    made.submit(request(0), now=0.0)
    assert sent(made) == {0: "only"}
    for number in (7, 5, 6):
        made.submit(request(number), now=0.0)
    order = []
    for before in (0, 5, 6):
        made.left(TrajectoryId(before, 0))
        order += list(sent(made, now=1.0))
    assert order == [5, 6, 7]


def test_a_free_server_takes_over_what_waits_for_a_full_one() -> None:
    made = scheduler(server("a", seats=1), server("b", seats=1), policy=StickyLeastLoaded())
    made.submit(request(1), now=0.0)
    made.submit(request(2), now=0.0)
    made.submit(request(3, last_slot="a", last_key=KEY), now=0.0)
    assert sent(made) == {1: "a", 2: "b"}
    made.left(TrajectoryId(2, 0))
    assert sent(made) == {3: "b"}


def test_a_free_server_leaves_a_request_to_the_one_that_has_a_seat_for_it() -> None:
    made = scheduler(server("b"), server("a"), policy=StickyLeastLoaded())
    made.submit(request(1, last_slot="a", last_key=KEY), now=0.0)
    assert sent(made) == {1: "a"}


def test_requests_of_a_server_that_goes_away_choose_again() -> None:
    made = scheduler(server("a", seats=1), policy=StickyLeastLoaded())
    made.submit(request(1), now=0.0)
    made.submit(request(2), now=0.0)
    assert sent(made) == {1: "a"}
    made.refresh([], latest=KEY, now=1.0)
    assert len(made) == 1
    made.refresh([server("b")], latest=KEY, now=2.0)
    assert sent(made, now=2.0) == {2: "b"}


def test_a_trajectory_begins_only_where_the_newest_version_is() -> None:
    old, new = server("old"), replace(server("new"), key=WeightVersion(1, 1))
    made = RequestScheduler(StickyLeastLoaded())
    made.refresh([old], latest=WeightVersion(1, 1), now=0.0)
    made.submit(request(1, turns=0), now=0.0)
    made.submit(request(2, turns=3), now=0.0)
    assert sent(made) == {2: "old"}
    made.refresh([old, new], latest=WeightVersion(1, 1), now=1.0)
    assert sent(made, now=1.0 + BEGIN_PATIENCE_S) == {1: "new"}


@pytest.mark.parametrize("patient", [True, False])
def test_what_waits_to_begin_is_shared_by_servers_that_get_a_version_one_after_the_other(
    patient: bool,
) -> None:
    newest = WeightVersion(1, 1)
    servers = [server("a", seats=16), server("b", seats=16)]
    made = RequestScheduler(LeastExpectedCost())
    made.refresh(servers, latest=newest, now=0.0)
    for number in range(8):
        made.submit(request(number, turns=0, context=100), now=0.0)
    made.submit(request(99, turns=3, context=100), now=0.0)
    assert set(sent(made)) == {99}, "what goes on does not wait for a version"
    servers[0].key = newest
    made.refresh(servers, latest=newest, now=1.0)
    began = sent(made, now=1.0)
    assert set(began.values()) == {"a"}
    assert 3 <= len(began) <= 5
    if patient:
        servers[1].key = newest
        made.refresh(servers, latest=newest, now=1.5)
    later = sent(made, now=1.0 + BEGIN_PATIENCE_S)
    assert set(later.values()) == ({"b"} if patient else {"a"})
    assert len(began) + len(later) == 8
    made.check()


@pytest.mark.parametrize("name", POLICIES.shipped)
@given(data=st.data())
def test_nothing_is_lost_and_nothing_sent_twice(name: str, data: st.DataObject) -> None:
    made = scheduler(server("a"), server("b", 2), server("c", 4), policy=find(POLICIES, name)())
    policy, now = made.policy, 0.0
    waiting: set[TrajectoryId] = set()
    inside: set[TrajectoryId] = set()
    for number in range(data.draw(st.integers(1, 25))):
        now += 1.0
        expected = data.draw(st.floats(1, 5000))
        one = request(number, expected=expected, waiting_since=now)
        if policy.estimator is not None:
            policy.estimator.begin(one.trajectory)
        made.submit(one, now=now)
        waiting.add(one.trajectory)
        for placed, _ in made.dispatch(now=now):
            waiting.remove(placed.trajectory)
            inside.add(placed.trajectory)
        made.check()
        leaves: bool = data.draw(st.booleans())
        if inside and leaves:
            made.left(inside.pop())
    while waiting:
        made.left(inside.pop())
        for placed, _ in made.dispatch(now=now):
            waiting.remove(placed.trajectory)
            inside.add(placed.trajectory)
    assert len(made) == 0


def evaluated(number: int, **more: Any) -> Request:
    return request(EVALUATION_GROUPS + number, **more)


def test_an_evaluation_waits_behind_every_request_of_training() -> None:
    made = scheduler(server("a", seats=1, kv=100_000))
    made.submit(evaluated(1), now=0.0)
    made.submit(request(1), now=0.0)
    assert sent(made) == {1: "a"}
    made.left(TrajectoryId(1, 0))
    assert sent(made) == {EVALUATION_GROUPS + 1: "a"}


def test_an_evaluation_that_waits_is_no_load_to_a_choice_of_training() -> None:
    made = scheduler(server("a", seats=8, kv=100_000))
    (queue,) = made.queues
    before = queue.next_step_s
    made.submit(evaluated(1), now=0.0)
    assert (len(made), made.waiting("a"), queue.next_step_s) == (0, 0, before)


def test_evaluations_take_a_share_of_the_seats_and_all_of_them_when_training_is_over() -> None:
    made = scheduler(server("a", seats=8, kv=100_000))
    for number in range(8):
        made.submit(evaluated(number), now=0.0)
    assert len(sent(made)) == 2 == made.evaluation_seats
    made.training_over = True
    made.left(TrajectoryId(EVALUATION_GROUPS, 0))
    assert len(sent(made)) == 6


def test_an_evaluation_that_has_waited_long_takes_the_next_seat_that_is_free() -> None:
    made = scheduler(server("a", seats=1, kv=100_000))
    made.submit(request(1), now=0.0)
    sent(made)
    made.submit(evaluated(1, waiting_since=0.0), now=0.0)
    for number in (2, 3):
        made.submit(request(number), now=0.0)
    made.left(TrajectoryId(1, 0))
    assert sent(made, now=EVALUATION_PATIENCE_S / 2) == {2: "a"}
    made.left(TrajectoryId(2, 0))
    assert sent(made, now=EVALUATION_PATIENCE_S) == {EVALUATION_GROUPS + 1: "a"}
    made.left(TrajectoryId(EVALUATION_GROUPS + 1, 0))
    assert sent(made, now=EVALUATION_PATIENCE_S) == {3: "a"}


def test_an_evaluation_goes_back_to_the_server_that_holds_its_context() -> None:
    made = scheduler(server("a", seats=4, kv=100_000), server("b", seats=4, kv=100_000))
    made.submit(evaluated(1, last_slot="b", last_key=KEY), now=0.0)
    made.submit(evaluated(2, last_slot="a", last_key=KEY), now=0.0)
    assert sent(made) == {EVALUATION_GROUPS + 1: "b", EVALUATION_GROUPS + 2: "a"}


def test_an_evaluation_whose_server_is_gone_goes_to_another() -> None:
    made = scheduler(server("a"), server("b"))
    made.submit(evaluated(1, last_slot="a", last_key=KEY), now=0.0)
    made.refresh([server("b")], latest=KEY, now=0.0)
    assert sent(made) == {EVALUATION_GROUPS + 1: "b"}


# -- policies of others ----------------------------------------------------------------------------


def chosen(policy: SchedulingPolicy, queues: ServerQueues, **more: Any) -> str | None:
    queue = policy.choose(request(1, **more), queues, now=0.0)
    return None if queue is None else queue.slot


@pytest.mark.parametrize(
    ("number", "long", "of_long", "of_short"),
    [
        (0, 900, None, None),
        (1, 900, "0", "0"),  # all have the only one
        (2, 900, "1", "0"),
        (5, 900, "2", "0"),  # 0.2 x 900 of 260 tokens are of long ones: 3 of 5 servers
        (5, 10, "4", "0"),  # one at least
        (5, 90_000, "1", "0"),  # one at least is left
    ],
)
def test_streamrl_gives_the_longest_fifth_servers_in_proportion_to_their_tokens(
    number: int, long: int, of_long: str | None, of_short: str | None
) -> None:
    queues = ServerQueues(server(str(slot)) for slot in range(number))
    for is_long, slot in ((True, of_long), (False, of_short)):
        policy = StreamRL({TrajectoryId(1, 0): is_long}.__getitem__, long=long, short=100)
        assert chosen(policy, queues) == slot
        assert policy.rank(request(1, turn=70)) == 70 - (long if is_long else 100)


def test_streamrl_keeps_a_request_where_it_was_if_that_is_of_its_group_and_has_a_seat() -> None:
    queues = ServerQueues(server(str(slot), seats=1) for slot in range(5))
    policy = StreamRL(lambda _: True, long=900, short=100)
    assert chosen(policy, queues, last_slot="3") == "3"
    assert chosen(policy, queues, last_slot="1") == "2"
    queues.by_slot["3"].enter(request(2))
    assert chosen(policy, queues, last_slot="3") == "2"


def test_round_robin_goes_on_to_the_next_server_and_leaves_requests_there() -> None:
    queues = ServerQueues((server("a"), server("b"), server("c")))
    policy = RoundRobin()
    assert [chosen(policy, queues) for _ in range(4)] == ["b", "c", "a", "b"]
    assert not policy.allow_steal(request(1), queues.all[0], queues.all[1], now=0.0)
    assert chosen(policy, ServerQueues()) is None


@pytest.mark.parametrize(("tokens", "slot"), [(1600, "short"), (1601, "long"), (9999, "long")])
def test_queues_of_levels_take_what_was_generated_or_is_expected(tokens: int, slot: str) -> None:
    queues = ServerQueues((server("short", 1), server("long", 2)))
    assert chosen(AttainedService(), queues, turn=tokens) == slot
    assert chosen(SiblingHistory(), queues, turn=0, expected=float(tokens)) == slot
    assert chosen(AttainedService(), ServerQueues()) is None
    assert AttainedService().rank(request(1, turn=tokens)) == tokens


def test_heddle_begins_on_the_fast_server_with_the_longest_and_stays() -> None:
    queues = ServerQueues((server("slow", 1), server("fast", 4)))
    assert chosen(Heddle(), queues) == "fast"
    assert chosen(Heddle(), queues, last_slot="slow") == "slow"
    assert Heddle().rank(request(1, expected=7.0)) == -7.0
    assert DynaRL().rank(request(1, tools=3)) == -3.0
