"""The policies that are compared: who admits how, and what the ones that know the future do."""

from dataclasses import replace
from typing import cast

import pytest

from libra_cli.bench.contenders import (
    ABLATIONS,
    CONSTANT_TOKENS,
    POLICIES,
    Future,
    contender,
)
from libra_cli.config.errors import LibraError
from libra_cli.core.scheduling.cmlfq import Cmlfq
from libra_cli.core.scheduling.least_cost import LeastExpectedCost, turn_tokens
from libra_cli.core.scheduling.policy import POLICIES as SCHEDULING_POLICIES
from libra_cli.core.scheduling.server_queues import Request, ServerQueue, ServerQueues
from libra_cli.core.types import Bucket, ToolOutcome, ToolReturn, TrajectoryId, WeightVersion
from libra_cli.sim.traces import RecordedEpisode, Trace, Turn
from tests.sim_scene import COSTS

EPISODE = RecordedEpisode("t", 500, (Turn(200, 100, "search", None, 1.0),) * 3, 0.0)
TRACE = Trace("made up", (EPISODE,))


def future() -> Future:
    known = Future()
    known.episode = lambda _: EPISODE
    return known


def queue() -> ServerQueue:
    cost = replace(COSTS[1], kv_tokens=12_000)
    return ServerQueue("a", Bucket("TP1", 1, 8, 4_000), cost, WeightVersion(1, 0))


def request(number: int, *, context: int = 5_000, generated: int = 400, turns: int = 2) -> Request:
    return Request(TrajectoryId(number, 0), context, generated, turns, turns, 0.0, None, None)


@pytest.mark.parametrize("name", [*POLICIES, *ABLATIONS])
def test_every_name_is_a_policy(name: str) -> None:
    policy = contender(name, future(), TRACE, 0)
    server = queue()
    if policy.estimator is not None:
        policy.estimator.begin(request(1).trajectory)
    assert policy.choose(request(1), ServerQueues([server]), now=0.0) is server


def test_every_baseline_can_be_run_with_admission() -> None:
    baselines = {*SCHEDULING_POLICIES.shipped, "streamrl"} - {"libra", "cmlfq"}
    assert {name + "+admission" for name in baselines} <= set(POLICIES)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(LibraError, match="none-such"):
        contender("none-such", future(), TRACE, 0)


@pytest.mark.parametrize("name", [name for name in POLICIES if name.endswith("+admission")])
def test_with_admission_a_baseline_admits_and_begins_as_libra_does(name: str) -> None:
    policy, libra = contender(name, future(), TRACE, 0), LeastExpectedCost()
    bare = contender(name.removesuffix("+admission"), future(), TRACE, 0)
    server = queue()
    server.enter(request(1))
    server.enter(request(2))
    queues = ServerQueues([server])
    assert bare.admits(request(3), server)
    assert not policy.admits(request(3), server)
    for contexts in (100, 10_000):
        assert policy.has_room(contexts, queues) == libra.has_room(contexts, queues)
    assert policy.rank(request(3)) == bare.rank(request(3))


def test_who_knows_the_lengths_looks_no_further_than_the_end() -> None:
    known = cast("LeastExpectedCost", contender("known-lengths", future(), TRACE, 0))
    assert known.horizon(request(1)) == turn_tokens(request(1)) == 200
    assert known.horizon(request(1, generated=590, turns=2)) == 10
    assert known.rank(request(1, generated=0, turns=1)) < known.rank(request(1, generated=590))


def test_the_whole_remainder_is_all_that_is_left_and_a_constant_is_one() -> None:
    whole = cast("LeastExpectedCost", contender("whole-remainder", future(), TRACE, 0))
    constant = cast("LeastExpectedCost", contender("constant", future(), TRACE, 0))
    assert [whole.horizon(request(1, generated=g)) for g in (200, 590)] == [400, 10]
    assert {constant.horizon(request(1, generated=g)) for g in (200, 590)} == {CONSTANT_TOKENS}


def test_levels_go_by_what_is_left_by_what_was_generated_or_by_no_tool() -> None:
    short, long = queue(), queue()
    short.bucket, long.bucket = Bucket("TP1", 1, 8, 300), Bucket("TP4", 4, 8, 4_000)
    long.slot = "b"
    queues = ServerQueues([short, long])

    def levels(name: str) -> list[int]:
        policy = cast("Cmlfq", contender(name, future(), TRACE, 0))
        asked = [request(1, generated=200, turns=1), request(1, generated=400)]
        policy.tree.begin(asked[0].trajectory)
        return [policy.level(one, queues) for one in asked]

    assert levels("known-levels") == [1, 0]
    assert levels("attained levels") == [0, 1]
    assert levels("no tool signals") == [0, 0]


def test_without_tool_signals_every_return_is_alike() -> None:
    tree = cast("Cmlfq", contender("no tool signals", future(), TRACE, 0)).tree
    for number in range(40):
        who, failed = TrajectoryId(number, 0), number % 2
        tree.begin(who)
        returned = ToolReturn("search", ToolOutcome.ERROR if failed else ToolOutcome.OK, 1.0, 4)
        expected = tree.returned(who, generated=50, returns=(returned,))
        tree.finished(who, generated=5_000 if failed else 60)
        assert number < 30 or 2_000 < expected < 3_000
