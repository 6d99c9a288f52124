"""The core itself changes its slots: checkpoint, stop, start again there, and on with the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.records import StepRecord
from tests.elastic import Scene, of, scene

A0 = "a/0"


def leave_core(world: Scene) -> None:
    """a/0 is to serve; the core is to be c/0 alone."""
    assert world.order(train=1).accepted


def test_a_resize_saves_first_and_goes_on_with_the_same_step():
    world = scene()
    incarnation = world.machine.training.incarnation
    leave_core(world)
    world.arrive()
    kinds = (a.Checkpoint, a.StopTrainer, a.StartTrainer, a.Train)
    done = [action for action in world.log if isinstance(action, kinds)]
    stop = next(i for i, action in enumerate(done) if isinstance(action, a.StopTrainer))
    saved, stopped, started = done[stop - 1 : stop + 2]
    assert isinstance(saved, a.Checkpoint)
    assert isinstance(started, a.StartTrainer)
    assert stopped == a.StopTrainer(incarnation, ("c/0", A0))
    assert (started.incarnation, started.train) == (incarnation + 1, ("c/0",))
    assert world.ledgers[started.resume]["step"] == saved.step
    world.until(lambda: world.machine.training.step > saved.step)
    steps = [action.step for action in world.did(a.Train)]
    assert steps == list(range(1, len(steps) + 1))
    groups = [group for group, _ in world.trained]
    assert len(groups) == len(set(groups))


def test_no_step_is_begun_while_a_resize_waits_for_its_checkpoint():
    world = scene()
    world.silent = of(e.CheckpointSaved)
    leave_core(world)
    world.until(lambda: world.kept)
    trained = len(world.did(a.Train))
    seen = world.events
    world.until(lambda: world.events > seen + 30)
    assert len(world.did(a.Train)) == trained
    assert world.machine.training.state is TrainerState.READY
    world.speak()
    world.arrive()
    world.steps_on()


def test_what_comes_to_slots_that_the_core_leaves_starts_beside_the_new_core():
    world = scene()
    world.silent = of(e.TrainerStarted)
    leave_core(world)
    world.until(lambda: world.kept and world.state(A0)[0] is ReplicaState.SERVING)
    assert world.machine.training.state is TrainerState.STARTING
    kinds = (a.StopTrainer, a.StartTrainer, a.StartServer)
    done = [type(one) for one in world.log if isinstance(one, kinds)]
    assert done[-3:] == [a.StopTrainer, a.StartTrainer, a.StartServer]
    world.speak()
    world.arrive()
    assert world.phases(A0) == ["stop", "start", "sync", "verify", "join"]
    assert world.moved(A0).state == "done"


def test_a_new_core_that_fails_to_start_brings_the_old_one_back():
    world = scene()
    step_before = world.machine.training.step
    world.silent = of(e.TrainerStarted)
    leave_core(world)
    world.until(lambda: world.kept)
    world.silent = lambda event: False
    world.give(e.TrainerFailed(world.machine.training.incarnation, "out of memory"))
    world.until(lambda: world.machine.training.state is TrainerState.READY)
    assert world.machine.training.slots == ("c/0", A0)
    assert world.machine.training.step >= step_before
    kinds = (a.StartTrainer, a.StartServer, a.StopServer)
    done = [one for one in world.log if isinstance(one, kinds)]
    assert [type(one) for one in done[-4:]] == [*kinds, a.StartTrainer]
    assert {one.slot for one in done if not isinstance(one, a.StartTrainer)} >= {A0}
    assert world.moved(A0).detail == (
        "the resized trainer did not start: out of memory; the slot is given back to train"
    )
    assert dict(world.machine.reconciler.plan(()).servers).keys() == {"a/1", "b/0", "b/1"}
    world.steps_on()


def fail_beside_a_server(world: Scene, *, died: bool = False) -> None:
    """The new core does not come up; a/0 serves by then, or has ``died``, and has yet to stop."""
    world.silent = of(e.TrainerStarted)
    leave_core(world)
    world.until(lambda: world.state(A0)[0] is ReplicaState.SERVING)
    world.silent = of(e.ServerStopped)
    if died:
        incarnation = world.machine.servers.replicas[A0].incarnation
        world.give(e.ServerFailed(A0, incarnation, "killed"))
    world.give(e.TrainerFailed(world.machine.training.incarnation, "out of memory"))
    world.until(lambda: world.machine.training.life.needs_room)


def test_the_core_comes_back_also_where_its_slot_has_the_last_server():
    world = scene()
    world.silent = of(e.TrainerStarted)
    leave_core(world)
    world.until(lambda: world.state(A0)[0] is ReplicaState.SERVING)
    world.silent = of(e.ServerStarted)
    for slot in ("a/1", "b/0", "b/1"):
        incarnation = world.machine.servers.replicas[slot].incarnation
        world.give(e.ServerFailed(slot, incarnation, "killed"))
    world.give(e.TrainerFailed(world.machine.training.incarnation, "out of memory"))
    world.until(lambda: world.machine.training.state is TrainerState.READY)
    assert world.machine.training.slots == ("c/0", A0)
    world.speak()
    world.steps_on()


@pytest.mark.parametrize("worked", [False, True])
def test_the_only_server_fails_where_the_core_was_while_that_resizes(worked: bool):
    world = scene()
    plan, bucket = world.machine.plan, dict(world.machine.plan.servers)["b/1"]
    others = ("c/0", "a/1", "b/0")
    if worked:
        leave_core(world)
        world.arrive()
    world.choose(replace(plan, servers=(("b/1", bucket),), train=(*others, A0)))
    world.arrive()
    world.silent = of(e.TrainerStarted)
    world.choose(replace(plan, servers=((A0, bucket),), train=(*others, "b/1")))
    world.until(lambda: world.state(A0)[0] is ReplicaState.STARTING)
    server = world.machine.servers.replicas[A0]
    world.give(e.ServerFailed(A0, server.incarnation, "no memory"))
    assert world.machine.training.state is TrainerState.STARTING
    if worked:  # it is started again, while the core comes up
        world.until(lambda: world.state(A0)[0] is ReplicaState.SERVING)
    world.speak()
    serves, trains = (A0, "b/1") if worked else ("b/1", A0)
    world.until(lambda: world.machine.training.slots == (*others, trains))
    world.until(lambda: world.state(serves)[0] is ReplicaState.SERVING)
    world.steps_on()


def test_a_core_that_comes_up_does_not_go_back_to_a_node_that_is_given_up():
    world = scene()
    plan, bucket = world.machine.plan, dict(world.machine.plan.servers)["b/1"]
    world.choose(replace(plan, servers=(("b/1", bucket),), train=("c/0", "b/0", A0)))
    world.arrive()
    world.silent = of(e.TrainerStarted)
    world.choose(replace(plan, servers=((A0, bucket),), train=("c/0", "b/0", "b/1")))
    world.until(lambda: world.state(A0)[0] is ReplicaState.STARTING)
    world.give(e.NodeLost("a", "cable"))
    world.give(e.NodeGone("a", "its lease has run out"))
    assert world.machine.reconciler.plan(()).train == ("c/0", "b/0", "b/1")


@pytest.mark.parametrize("died", [False, True])
def test_a_plan_that_wants_the_slot_of_a_core_that_comes_back_waits_for_it(died: bool):
    world = scene()
    fail_beside_a_server(world, died=died)
    servers = len(world.did(a.StartServer))
    plan = world.machine.plan
    bucket = dict(plan.servers)["a/1"]
    world.choose(replace(plan, servers=(*plan.servers, (A0, bucket)), train=("c/0",)))
    world.speak()
    world.arrive()
    started = [one.train for one in world.did(a.StartTrainer)]
    assert started[-3:] == [("c/0",), ("c/0", A0), ("c/0",)]
    assert len(world.did(a.StartServer)) == servers + 1
    assert world.state(A0)[0] is ReplicaState.SERVING
    world.steps_on()


def test_a_run_that_ends_while_its_core_waits_to_come_back_starts_no_more():
    world = scene()
    fail_beside_a_server(world)
    started = len(world.did(a.StartTrainer))
    world.give(e.StopRequested(at_once=False, reason="asked"))
    world.speak()
    world.until(lambda: world.did(a.End))
    assert len(world.did(a.StartTrainer)) == started


def test_a_move_to_a_core_that_is_being_stopped_keeps_the_slots_that_have_worked():
    world = scene()
    world.silent = of(e.TrainerStarted)
    assert world.order(train=3).accepted
    world.until(lambda: world.kept)
    training = world.machine.training
    (new,) = set(training.slots) - {"c/0", A0}
    world.silent = of(e.TrainerStopped)
    world.give(e.TrainerFailed(training.incarnation, "out of memory"))
    assert training.state is TrainerState.STOPPING
    world.time_is_up(new)
    assert world.moved(new).state == "failed"
    assert world.machine.reconciler.plan(()).train == ("c/0", A0)
    world.speak()
    world.steps_on()
    assert training.slots == ("c/0", A0)
    assert world.state(new)[0] is ReplicaState.SERVING


def test_a_resize_in_mid_stream_gives_the_parts_to_the_new_core_again():
    world = scene(stream=True)
    world.until(lambda: world.machine.training.streaming)
    leave_core(world)
    world.arrive()
    world.steps_on()
    groups = [group for group, _ in world.trained]
    assert len(groups) == len(set(groups))


def test_an_order_that_takes_a_resize_back_before_it_has_begun_stops_nobody():
    world = scene()
    world.silent = of(e.StepDone)
    world.until(lambda: world.machine.training.state is TrainerState.BUSY)
    plan = world.machine.plan
    leave_core(world)
    world.choose(plan)
    world.speak()
    world.steps_on()
    assert not world.did(a.StopTrainer)
    assert world.machine.training.slots == ("c/0", A0)


def test_a_checkpoint_is_scored_by_the_mean_reward_of_its_last_ten_steps():
    world = scene()
    world.until(lambda: world.machine.training.step >= 11)
    leave_core(world)
    world.arrive()
    saved = world.did(a.Checkpoint)[-1]
    rewards = {row.step: row.reward for row in world.rows(StepRecord)}
    last = [rewards[step] for step in range(saved.step - 9, saved.step + 1)]
    assert saved.ledger["score"] == pytest.approx(sum(last) / 10)


def test_a_checkpoint_of_fewer_steps_has_no_score():
    world = scene()
    leave_core(world)
    world.arrive()
    saved = world.did(a.Checkpoint)[-1]
    assert saved.step < 10
    assert saved.ledger["score"] is None
