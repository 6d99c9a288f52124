"""A server that does not prove a version is asked again, then replaced, and only then given up.
So is one that breaks requests off."""

from __future__ import annotations

import pytest

from libra_cli.core.actions import StartServer, StopServer, SyncServer
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.replica_set import GONE_S
from libra_cli.core.cluster.restarts import MAX_RESTARTS
from libra_cli.core.cluster.rollout_servers import MAX_FAILURES, RolloutServers
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.events import (
    PublishedVersion,
    ServerChecked,
    ServerSampled,
    ServerStarted,
    ServerStopped,
    ServerSynced,
    SyncFailed,
)
from libra_cli.core.notices import ProcessGone, Result
from libra_cli.core.types import Bucket, Plan, Pool, Role, Slot, TrajectoryId, WeightVersion

SLOT = Slot("b/0", "b", (), Pool.ROLLOUT)
BUCKET = Bucket("all", 1, 8, 1000)
COST = ServerCost(1, 0.01, 0.0, 0.0, 0.0, 0.0, 1000)
FIRST, SECOND = (PublishedVersion(WeightVersion(1, step), 1000, 0.0) for step in (0, 1))


class Servers(RolloutServers):
    """One server, and what happens to it."""

    def __init__(self) -> None:
        plan = Plan(((SLOT.id, BUCKET),), train=())
        super().__init__(plan, [SLOT], lambda _: COST)
        self.publish(FIRST)
        self.start(self.one, now=0.0)
        self.begin()

    @property
    def one(self) -> Replica:
        return self.replicas[SLOT.id]

    def begin(self) -> None:
        """The process that was started generates."""
        self.started(ServerStarted(SLOT.id, self.one.incarnation), now=1.0)

    def refuse(self, *, gap: float | None = None) -> list[type]:
        """The server answers that it does not hold the newest version."""
        assert self.latest is not None
        failed = SyncFailed(SLOT.id, self.one.incarnation, self.latest, "no", True, gap)
        return kinds(self.sync_failed(failed, now=2.0))

    def prove(self) -> None:
        """The server proves the newest version."""
        assert self.latest is not None
        proved = ServerSynced(
            SLOT.id, self.one.incarnation, self.latest, 1e-6, 0.0, 0.0, 2.0, 0, "local"
        )
        self.synced(proved, now=2.0)

    def break_off(self) -> list[type]:
        """A request breaks off, and the server is asked whether it works: it says so."""
        self.request_sent(SLOT.id, now=2.0)
        broken = kinds(self.request_broke(SLOT.id, "reset", 7, now=2.0))
        self.request_ended(SLOT.id, answered=False, now=2.0)
        self.checked(ServerChecked(SLOT.id, self.one.incarnation))
        return broken

    def answer(self) -> None:
        """A request is answered."""
        self.request_sent(SLOT.id, now=2.0)
        self.request_ended(SLOT.id, answered=True, now=2.0)

    def end(self) -> list[type]:
        """No process is left."""
        stopped = ServerStopped(SLOT.id, self.one.incarnation)
        assert self.gone(stopped) == [ProcessGone(self.one)]
        return kinds(self.after_end(self.one, again=True, now=3.0)) or self.rest()

    def rest(self) -> list[type]:
        """The wait before it is started again is over, if there is one."""
        if not self.one.resting:
            return []
        self.one.resting = False
        return kinds(self.start(self.one, now=4.0))


def kinds(results: list[Result]) -> list[type]:
    """What is to be done, without the records."""
    actions = (StartServer, StopServer, SyncServer)
    return [type(result) for result in results if isinstance(result, actions)]


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.mark.parametrize("gap", [None, 3.0])
def test_a_first_failed_sync_is_tried_again(servers, gap):
    assert servers.refuse(gap=gap) == [SyncServer]
    servers.prove()
    assert servers.one.state is ReplicaState.SERVING


def test_a_version_is_unproved_from_a_lost_answer_until_it_is_proved(servers):
    servers.prove()
    servers.publish(SECOND)
    lost = SyncFailed(SLOT.id, servers.one.incarnation, SECOND, "reset", answered=False)
    servers.sync_failed(lost, now=2.0)
    assert servers.one.unproved == {SECOND.version}
    servers.checked(ServerChecked(SLOT.id, servers.one.incarnation))
    servers.prove()
    assert servers.one.unproved == set()


def test_a_server_that_never_proves_anything_is_replaced_once_and_then_failed(servers):
    assert [servers.refuse(), servers.refuse()] == [[SyncServer], [StopServer]]
    assert servers.end() == [StartServer]
    servers.begin()
    assert [servers.refuse(), servers.refuse()] == [[SyncServer], [StopServer]]
    assert servers.end() == []
    assert servers.one.state is ReplicaState.FAILED
    assert servers.all_failed == "b/0: no"


def test_a_server_that_failed_for_good_begins_anew_where_a_plan_hopes_for_it(servers):
    for _ in range(2):
        servers.refuse()
        servers.refuse()
        servers.end()
        if servers.one.state is not ReplicaState.FAILED:
            servers.begin()
    one = servers.one
    one.has_worked = one.restarts_unproved = True
    one.reset(now=9.0)
    assert (one.state, one.role) == (ReplicaState.IDLE, Role.IDLE)
    assert (one.has_worked, one.restarts_unproved) == (False, False)


@pytest.mark.parametrize(("seconds", "why"), [(GONE_S - 1, ""), (GONE_S, "b/0: its lease is over")])
def test_no_server_is_left_once_the_last_ones_node_has_been_gone_for_an_hour(servers, seconds, why):
    servers.prove()
    servers.node_gone("b", "its lease is over", now=10.0)
    assert servers.gone(ServerStopped(SLOT.id, servers.one.incarnation))
    servers.after_end(servers.one, again=True, now=20.0)
    servers.label_idle({SLOT.id})
    servers.node_overdue("b", now=10.0 + seconds)
    assert servers.all_failed == why
    servers.back("b", frozenset(), now=10.0 + seconds)
    assert servers.all_failed == ""


def test_a_reading_is_rates_since_the_one_before_and_tells_none_of_a_process_that_began_anew(
    servers, monkeypatch
):
    servers.prove()
    (queue,) = servers.routable()
    queue.inside[TrajectoryId(7, 0)] = queue.context = 500
    servers.request_sent(SLOT.id, now=2.0)
    rates, learnt = [], []
    monkeypatch.setattr(servers._costs, "observe", lambda _, **told: learnt.append(told))
    for at, tokens in ((2.0, 100), (12.0, 160), (22.0, 30)):
        reading = ServerSampled(SLOT.id, servers.one.incarnation, 1, 0, 0.5, None, 0, tokens)
        saved, _ = servers.sampled(reading, now=at)
        rates.append((saved.record.tokens_per_s, saved.record.occupancy))
    assert rates == [(0.0, 0.0), (6.0, 1 / BUCKET.max_num_seqs), (0.0, 1 / BUCKET.max_num_seqs)]
    assert learnt == [{"running": 1.0, "kv_tokens": 500.0, "step_s": 10 / 60}]


def test_the_first_reading_of_a_process_is_compared_with_none_of_the_one_before(servers):
    servers.prove()
    rates = []
    for at, tokens in ((2.0, 100), (12.0, 160), (22.0, 200)):
        if at > 12.0:
            servers.publish(SECOND)
            servers.refuse()
            servers.refuse()
            servers.end()
            servers.begin()
        reading = ServerSampled(SLOT.id, servers.one.incarnation, 1, 0, 0.5, None, 0, tokens)
        saved, _ = servers.sampled(reading, now=at)
        rates.append(saved.record.tokens_per_s)
    assert rates == [0.0, 6.0, 0.0]


def test_the_process_that_replaces_it_may_work(servers):
    servers.refuse()
    servers.refuse()
    servers.end()
    servers.begin()
    servers.prove()
    assert servers.one.state is ReplicaState.SERVING


def test_a_server_that_has_worked_is_replaced_as_often_as_after_any_failure(servers):
    servers.prove()
    servers.publish(SECOND)
    for _ in range(MAX_RESTARTS):
        assert [servers.refuse(), servers.refuse()] == [[SyncServer], [StopServer]]
        assert servers.end() == [StartServer]
        servers.begin()
    assert [servers.refuse(), servers.refuse()] == [[SyncServer], [StopServer]]
    assert servers.end() == []


def test_a_proof_forgets_the_failure_before_it(servers):
    servers.refuse()
    servers.prove()
    servers.publish(SECOND)
    assert servers.refuse() == [SyncServer]


def test_a_server_that_may_have_generated_with_wrong_weights_is_not_asked_again(servers):
    servers.prove()
    servers.publish(SECOND)
    assert servers.refuse(gap=3.0) == [StopServer]


def test_a_process_that_never_started_is_not_started_again():
    servers = Servers()
    servers.one.state = ReplicaState.STARTING
    servers.take_out(servers.one, "no memory", now=1.0)
    assert servers.end() == []


def test_a_server_that_breaks_off_every_request_is_replaced(servers):
    servers.prove()
    assert [servers.break_off() for _ in range(MAX_FAILURES)] == [[]] * MAX_FAILURES
    assert servers.break_off() == [StopServer]


def test_what_broke_off_before_an_answer_is_forgiven(servers):
    servers.prove()
    for _ in range(3):
        assert [servers.break_off() for _ in range(MAX_FAILURES)] == [[]] * MAX_FAILURES
        servers.answer()
    assert servers.one.state is ReplicaState.SERVING


def test_what_breaks_off_on_a_server_that_is_being_stopped_says_nothing(servers):
    servers.prove()
    servers.take_out(servers.one, "moved", now=2.0)
    assert servers.request_broke(SLOT.id, "reset", 7, now=2.0) == []
    assert (servers.one.suspect, servers.one.failures) == (False, 0)
