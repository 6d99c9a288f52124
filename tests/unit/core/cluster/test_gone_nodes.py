"""A node that is given up may come back: what failed there is forgiven, and its slots are used."""

from __future__ import annotations

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.cluster.restarts import LATER_S
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.types import node_of
from tests.elastic import Scene, scene

GONE = "its lease has run out"


def lose(world: Scene, node: str) -> None:
    """The node is lost, then given up."""
    world.give(e.NodeLost(node, "cable"))
    world.give(e.NodeGone(node, GONE))


def test_what_ran_on_a_node_that_is_given_up_is_stopped_and_not_started_there():
    world = scene()
    lose(world, "b")
    world.steps_on(3)
    servers = world.machine.servers.replicas
    assert [servers[slot].state for slot in ("b/0", "b/1")] == [ReplicaState.IDLE] * 2
    assert len(world.did(a.StartServer)) == 3


def test_a_node_that_comes_back_after_it_was_given_up_serves_again():
    world = scene()
    lose(world, "b")
    world.steps_on(1)
    world.give(e.NodeBack("b", frozenset()))
    servers = world.machine.servers.replicas
    world.until(lambda: all(one.state is ReplicaState.SERVING for one in servers.values()))


def test_a_server_that_had_failed_for_good_is_tried_on_a_node_that_came_back():
    world = scene()
    world.faults.start_fails = 1.0
    server = world.machine.servers.replicas["b/0"]
    server.has_worked = False
    world.give(e.ServerFailed("b/0", server.incarnation, "died"))
    world.until(lambda: server.state is ReplicaState.FAILED)
    world.faults.start_fails = 0.0
    lose(world, "b")
    assert server.state is ReplicaState.FAILED
    world.give(e.NodeBack("b", frozenset()))
    back = world.now
    world.until(lambda: server.state is ReplicaState.SERVING)
    assert world.now < back + LATER_S, "it was not forgiven, but only tried again some time later"


def test_a_trainer_waits_for_a_node_of_its_ranks_and_goes_on_when_it_is_back():
    world = scene()
    training = world.machine.training
    lose(world, "c")
    world.until(lambda: training.state is TrainerState.DOWN)
    started = len(world.did(a.StartTrainer))
    for _ in range(20):
        world.now += 60.0
        world.give(e.TimerFired("trainer"))
    assert len(world.did(a.StartTrainer)) == started
    world.give(e.NodeBack("c", frozenset()))
    world.steps_on(2)


def test_a_run_ends_though_a_node_never_comes_back():
    world = scene()
    lose(world, "b")
    world.give(e.StopRequested(at_once=False, reason="asked"))
    world.until(lambda: world.end)


def test_nobody_is_given_a_version_of_a_trainer_whose_node_is_gone():
    world = scene()
    world.steps_on(2)
    lose(world, "c")
    before = len(world.did(a.SyncServer))
    server = world.machine.servers.replicas["b/0"]
    world.give(e.ServerFailed("b/0", server.incarnation, "died"))
    world.until(lambda: server.state is ReplicaState.JOINING)
    world.give(e.NodeBack("c", frozenset()))
    world.until(lambda: server.state is ReplicaState.SERVING)
    offered = {sync.published.version for sync in world.did(a.SyncServer)[before:]}
    assert {version.trainer_incarnation for version in offered} == {2}


def test_a_sync_that_breaks_off_since_the_trainers_node_is_gone_is_no_fault_of_a_server():
    world = scene()
    world.silent = lambda event: isinstance(event, e.ServerSynced) and event.slot == "b/0"
    world.steps_on(1)
    server = world.machine.servers.replicas["b/0"]
    assert server.syncing is not None
    lose(world, "c")
    lost = e.SyncFailed("b/0", server.incarnation, server.syncing, "HTTP 404", answered=False)
    world.give(lost)
    assert (server.broken_syncs, server.failures, server.suspect) == (0, 0, False)


def test_a_trainer_does_not_move_to_a_node_that_is_given_up():
    world = scene()
    training = world.machine.training
    before = training.slots
    world.order(train=3)
    world.until(lambda: training.life.resizing and training.state is TrainerState.STOPPING)
    here = {node_of(slot) for slot in before}
    (node,) = {node_of(slot) for slot in training.life.target_slots} - here
    lose(world, node)
    world.steps_on(2)
    assert training.slots == before


def measured(world: Scene) -> int:
    """The steps that a planner would be shown as measured."""
    seen = world.machine.observe()
    assert seen is not None
    return len(seen.measured)


def test_steps_with_a_node_that_is_given_up_since_or_is_back_since_measure_nothing():
    world = scene()
    world.steps_on(3)
    assert measured(world) > 0
    lose(world, "b")
    assert measured(world) == 0
    world.steps_on(3)
    assert measured(world) > 0
    world.give(e.NodeBack("b", frozenset()))
    servers = world.machine.servers.replicas
    world.until(lambda: servers["b/0"].state is ReplicaState.SERVING)
    assert measured(world) == 0


def test_steps_before_a_node_did_not_answer_for_a_while_are_measured_all_the_same():
    world = scene()
    world.steps_on(3)
    before = measured(world)
    world.give(e.NodeLost("b", "cable"))
    world.give(e.NodeBack("b", frozenset({"server-0", "server-1"})))
    assert measured(world) == before > 0
