"""C-MLFQ: levels of unlike servers, and nothing but libra's own rule where they are alike."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.scheduling.cmlfq import Cmlfq
from libra_cli.core.scheduling.least_cost import LeastExpectedCost
from libra_cli.core.scheduling.request_scheduler import RequestScheduler
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Bucket, ToolOutcome, ToolReturn, TrajectoryId, WeightVersion
from tests.sim_scene import COSTS

KEY = WeightVersion(1, 0)
OK = ToolReturn("search", ToolOutcome.OK, 1.0, 400)
ERROR = ToolReturn("search", ToolOutcome.ERROR, 1.0, 400)


def server(slot: str, degree: int, *, up_to: int, kv: int = 100_000, seats: int = 4) -> ServerQueue:
    cost = replace(COSTS[degree], kv_tokens=kv)
    return ServerQueue(slot, Bucket(f"TP{degree}", degree, seats, up_to), cost, KEY)


def request(group: int, *, turns: int = 1, context: int = 500, last: str | None = None) -> Request:
    key = KEY if last else None
    who = TrajectoryId(group, 0)
    return Request(who, context, 50 * turns, turns, turns, 0.0, last, key)


def policy() -> Cmlfq:
    """One that has seen 10 tokens left after a success and 5,000 after an error."""
    made = Cmlfq()
    for group in range(1_000, 1_120):
        who = TrajectoryId(group, 0)
        made.tree.begin(who)
        returned, left = (OK, 10) if group % 2 else (ERROR, 5_000)
        made.tree.returned(who, generated=50, returns=(returned,))
        made.tree.finished(who, generated=50 + left)
    return made


def played(made: Cmlfq, group: int, *returns: ToolReturn) -> None:
    who = TrajectoryId(group, 0)
    made.tree.begin(who)
    for number, each in enumerate(returns, start=1):
        made.tree.returned(who, generated=50 * number, returns=(each,))


def chosen(made: LeastExpectedCost, asked: Request, *servers: ServerQueue) -> str:
    queue = made.choose(asked, ServerQueues(servers), now=0.0)
    assert queue is not None
    return queue.slot


def unlike(*, faster: float = 1.1, **more: int) -> tuple[ServerQueue, ServerQueue, ServerQueue]:
    """The long level has the faster servers, which libra's own rule would take."""
    a, b = server("short-1", 1, up_to=100, **more), server("short-2", 1, up_to=100, **more)
    law = replace(COSTS[1], kv_tokens=100_000)
    law = replace(law, step_s=law.step_s / faster, prefill_token_s=law.prefill_token_s / faster)
    return a, b, ServerQueue("long", Bucket("TP4", 4, 4, 20_000), law, KEY)


def test_everything_starts_on_the_level_for_the_least_work() -> None:
    made = policy()
    played(made, 1)
    first = replace(request(1, turns=0), generated=0)
    assert chosen(made, first, *unlike()) == "short-1"
    assert chosen(LeastExpectedCost(), first, *unlike()) == "long"


def test_an_error_demotes_and_a_success_keeps() -> None:
    made = policy()
    played(made, 1, ERROR)
    played(made, 2, OK)
    assert chosen(made, request(1), *unlike()) == "long"
    assert chosen(made, request(2), *unlike()) == "short-1"


def test_a_success_after_an_error_promotes() -> None:
    made = policy()
    for group in range(2_000, 2_060):
        played(made, group, ERROR, OK)
        made.tree.finished(TrajectoryId(group, 0), generated=110)
    played(made, 1, ERROR, OK)
    assert chosen(made, request(1, turns=2), *unlike()) == "short-1"


def test_on_its_level_a_turn_goes_where_it_costs_least() -> None:
    made, servers = policy(), unlike()
    played(made, 2, OK)
    servers[0].enter(request(50))
    assert chosen(made, request(2), *servers) == "short-2"
    # A long context stays with its cache beside one more request, and on another level.
    assert chosen(made, request(2, context=20_000, last="short-1"), *servers) == "short-1"
    assert chosen(made, request(2, context=20_000, last="long"), *servers) == "long"


@pytest.mark.parametrize(("faster", "slot"), [(1.25, "short-1"), (1.35, "long")])
def test_another_level_is_taken_where_it_is_that_much_cheaper(faster: float, slot: str) -> None:
    made = policy()
    played(made, 2, OK)
    assert chosen(made, request(2), *unlike(faster=faster)) == slot


def test_what_a_level_cannot_hold_goes_to_another() -> None:
    made = policy()
    played(made, 2, OK)
    assert chosen(made, request(2, context=500), *unlike(kv=400)) == "long"


def test_a_level_that_is_gone_is_that_of_the_servers_that_stay() -> None:
    made = policy()
    played(made, 1, ERROR)
    assert chosen(made, request(1), *unlike()[:2]) == "short-1"
    assert chosen(made, request(1), *unlike()) == "long"
    assert made.choose(request(1), ServerQueues(), now=0.0) is None


def test_an_idle_level_takes_over_what_waits_for_a_full_one() -> None:
    made = RequestScheduler(policy())
    made.refresh(unlike(seats=1), latest=KEY, now=0.0)
    for group in range(3):
        played(made.policy, group)  # type: ignore[arg-type]
        made.submit(replace(request(group, turns=0), generated=0), now=0.0)
    placed = [queue.slot for _, queue in made.dispatch(now=0.0)]
    assert sorted(placed) == ["long", "short-1", "short-2"]


REQUESTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 9_000), st.booleans()),
    max_size=60,
)


@given(calls=REQUESTS)
def test_where_servers_are_alike_it_is_libra(calls: list[tuple[int, int, int, bool]]) -> None:
    """Whatever is asked, returned and seated: the same server, rank, admission and room."""
    slots = ("a", "b", "c")
    ours, libra = policy(), LeastExpectedCost()
    servers = [server(slot, 1, up_to=9_000, kv=9_000, seats=2) for slot in slots]
    queues = ServerQueues(servers)
    for group, at, context, failed in calls:
        who = TrajectoryId(group, 0)
        if who not in ours.tree._under_way:
            ours.tree.begin(who)
        ours.tree.returned(who, generated=50, returns=(ERROR if failed else OK,))
        asked = request(group, context=context, last=(*slots, None)[at])
        mine = ours.choose(asked, queues, now=0.0)
        assert mine is libra.choose(asked, queues, now=0.0)
        assert mine is not None
        assert ours.rank(asked) == libra.rank(asked)
        assert ours.has_room(context, queues) == libra.has_room(context, queues)
        for each in servers:
            assert ours.admits(asked, each) == libra.admits(asked, each)
            assert ours.allow_steal(asked, mine, each, now=0.0) == libra.allow_steal(
                asked, mine, each, now=0.0
            )
        if mine.has_seat and who not in mine.inside:
            mine.enter(asked)
