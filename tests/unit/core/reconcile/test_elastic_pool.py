"""Slots on their way: the phases, what ends each, and what becomes of a move that fails."""

from __future__ import annotations

from dataclasses import replace
from json import loads

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.cluster.restarts import MAX_RESTARTS
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.launch.process import process_of, worker_of
from libra_cli.core.reconcile.migration import LIFECYCLE, MigrationPhase
from libra_cli.core.records import SlotRecord
from libra_cli.core.types import Plan, Role
from tests.elastic import Scene, of, scene

P, S = MigrationPhase, ReplicaState
B1 = "b/1"


def in_phase(world: Scene, phase: MigrationPhase, slot: str = B1) -> None:
    world.until(lambda: world.move(slot).phase is phase)


def joins_core(world: Scene) -> Plan:
    plan = world.machine.plan
    servers = tuple((slot, bucket) for slot, bucket in plan.servers if slot != B1)
    return replace(plan, servers=servers, train=(*plan.train, B1))


def test_without_room_the_old_process_is_gone_before_the_new_one_starts():
    world = scene(gpus=True)
    assert world.order(gradient=1).accepted
    in_phase(world, P.START)
    assert world.state(B1) == (S.IDLE, S.STARTING)
    world.arrive()
    assert world.moved(B1).state == "done"
    assert world.phases(B1) == ["drain", "stop", "start", "sync", "verify", "join"]


def test_with_room_the_old_process_works_until_the_new_one_has_proved_itself():
    world = scene(gpus=False)
    world.order(gradient=1)
    in_phase(world, P.SYNC)
    assert world.state(B1) == (S.SERVING, S.JOINING)
    world.arrive()
    assert world.moved(B1).state == "done"
    assert world.phases(B1) == ["start", "sync", "verify", "drain", "stop", "join"]


@pytest.mark.parametrize("gpus", [True, False])
def test_a_worker_becomes_a_server_again_by_the_same_phases(gpus):
    world = scene(gpus=gpus)
    world.order(gradient=1)
    world.arrive()
    there = world.phases(B1)
    world.order(gradient=0)
    world.arrive()
    back = world.phases(B1)
    assert world.moved(B1).state == "done"
    # A worker without a share of the step under way has nothing to drain.
    assert back in (there, [phase for phase in there if phase != "drain"])
    assert world.state(B1) == (S.SERVING, S.IDLE)


@pytest.mark.parametrize("skew_s", [-1e6, 0.0, 1e6])
def test_phases_follow_one_another_whatever_the_clock_of_the_host_says(skew_s):
    world = scene()
    world.silent = of(e.WorkerSynced, B1)
    world.order(gradient=1)
    world.until(lambda: world.kept)
    (synced,) = (event for event in world.kept if isinstance(event, e.WorkerSynced))
    world.kept, world.silent = [], lambda event: False
    world.give(replace(synced, loaded_at=synced.loaded_at + skew_s))
    world.arrive()
    began = [at for _, at, _ in loads(world.moved(B1).phases_json)]
    assert began == sorted(began)
    assert began[-1] <= world.now


def test_a_server_is_started_again_in_another_shape_without_a_failure():
    world = scene()
    plan = world.machine.plan
    shape = dict(plan.servers)
    smaller = replace(shape[B1], max_num_seqs=2)
    world.choose(replace(plan, servers=tuple({**shape, B1: smaller}.items())))
    world.arrive()
    status = world.machine.servers.replicas[B1]
    assert (status.state, status.bucket, status.restarts) == (S.SERVING, smaller, 0)
    assert world.phases(B1) == ["drain", "stop", "start", "sync", "verify", "join"]


def test_a_server_that_does_not_come_up_in_another_shape_is_given_its_old_one():
    world = scene()
    plan = world.machine.plan
    shape = dict(plan.servers)
    world.silent = of(e.ServerStarted, B1)
    smaller = replace(shape[B1], max_num_seqs=2)
    world.choose(replace(plan, servers=tuple({**shape, B1: smaller}.items())))
    in_phase(world, P.START)
    world.silent = lambda event: False
    world.give(e.ServerFailed(B1, world.machine.servers.replicas[B1].incarnation, "no memory"))
    row = world.moved(B1)
    assert (row.state, row.detail) == ("failed", "no memory; the slot is given back to rollout")
    world.until(lambda: world.state(B1)[0] is S.SERVING)
    assert world.machine.servers.replicas[B1].bucket == shape[B1]


def test_lengths_that_a_server_is_meant_for_move_nothing():
    world = scene()
    plan = world.machine.plan
    other = tuple((slot, replace(bucket, up_to_tokens=30)) for slot, bucket in plan.servers)
    world.choose(replace(plan, servers=other))
    assert not world.machine.reconciler.moves
    assert world.machine.servers.replicas[B1].bucket == other[-1][1]


# -- deadlines ------------------------------------------------------------------------------------


def test_every_phase_has_a_cause_a_deadline_and_what_happens_otherwise():
    assert set(LIFECYCLE) == set(MigrationPhase)
    for edge in LIFECYCLE.values():
        assert edge.cause
        assert edge.otherwise
        assert edge.deadline_s > 0


def test_every_phase_that_is_waited_for_asks_to_be_woken_at_its_deadline():
    world = scene()
    world.order(gradient=1)
    number = world.move(B1).number
    world.arrive()
    wakes = {wake.name: wake.after_s for wake in world.did(a.Wake)}
    # The end of verify comes with that of sync.
    for phase in set(MigrationPhase) - {P.VERIFY}:
        assert wakes[f"move {number} {phase}"] == LIFECYCLE[phase].deadline_s


def test_turns_that_do_not_end_are_aborted_and_then_left_behind():
    world = scene()
    world.silent = of((e.TurnGenerated, e.TurnFailed), B1)
    world.until(lambda: world.machine.servers.replicas[B1].running)
    world.order(gradient=1)
    timer = f"drain {B1} {world.machine.servers.replicas[B1].incarnation}"
    assert {w.name for w in world.did(a.Wake)} >= {f"{timer} abort", f"{timer} out"}
    world.give(e.TimerFired(f"{timer} abort"))
    inside = world.machine.servers.replicas[B1].running
    assert [abort.slot for abort in world.did(a.AbortTurn)] == [B1] * inside
    assert world.state(B1)[0] is S.DRAINING
    world.give(e.TimerFired(f"{timer} out"))
    assert world.state(B1)[0] is S.STOPPING
    world.arrive()
    assert world.moved(B1).state == "done"


def test_a_drain_that_is_overdue_goes_on_without_the_turns():
    world = scene()
    world.silent = of((e.TurnGenerated, e.TurnFailed), B1)
    world.until(lambda: world.machine.servers.replicas[B1].running)
    world.order(gradient=1)
    in_phase(world, P.DRAIN)
    world.time_is_up(B1)
    assert world.state(B1)[0] is S.STOPPING
    world.arrive()
    assert world.moved(B1).state == "done"


def test_a_worker_that_does_not_end_its_share_leaves_it_to_the_core():
    world = scene()
    world.order(gradient=1)
    world.arrive()
    sharing(world)
    world.order(gradient=0)
    in_phase(world, P.DRAIN)
    world.time_is_up(B1)
    assert world.state(B1)[1] is S.STOPPING
    world.speak()
    world.arrive()
    assert world.moved(B1).state == "done"


def sharing(world: Scene) -> None:
    """A step is under way in which b/1 has a share."""
    world.silent = of(e.StepDone)
    world.until(lambda: world.kept and any(s.slot == B1 for s in world.did(a.Train)[-1].shares))


def test_nothing_is_started_on_a_slot_whose_host_has_not_said_that_all_is_gone():
    world = scene()
    world.silent = of(e.ServerStopped, B1)
    world.order(gradient=1)
    in_phase(world, P.STOP)
    world.time_is_up(B1)
    row = world.moved(B1)
    assert row.state == "failed"
    assert row.detail == "stop took longer than 600 s; the slot is given back to rollout"
    started = len(world.did(a.StartServer))
    world.steps_on(3)
    assert len(world.did(a.StartServer)) == started
    assert not world.did(a.StartWorker)
    world.speak()
    world.until(lambda: world.state(B1)[0] is S.SERVING)
    assert world.machine.servers.replicas[B1].restarts == 0


@pytest.mark.parametrize(
    ("phase", "silent"), [(P.START, e.WorkerStarted), (P.SYNC, e.WorkerSynced)]
)
@pytest.mark.parametrize("gpus", [True, False])
def test_a_worker_that_is_not_ready_in_time_is_stopped_and_the_server_serves_on(
    phase, silent, gpus
):
    world = scene(gpus=gpus)
    world.silent = of(silent, B1)
    world.order(gradient=1)
    in_phase(world, phase)
    world.time_is_up(B1)
    assert world.state(B1)[1] is S.STOPPING
    row = world.moved(B1)
    left = "is given back to rollout" if gpus else "goes on as rollout"
    limit = f"{LIFECYCLE[phase].deadline_s:.0f}"
    assert row.detail == f"{phase} took longer than {limit} s; the slot {left}"
    world.silent = lambda event: False
    world.until(lambda: world.state(B1) == (S.SERVING, S.IDLE))


def test_a_server_that_is_not_ready_in_time_leaves_the_slot_to_the_worker():
    world = scene()
    world.order(gradient=1)
    world.arrive()
    world.silent = of(e.ServerSynced, B1)
    world.order(gradient=0)
    in_phase(world, P.SYNC)
    world.time_is_up(B1)
    assert world.moved(B1).detail.endswith("the slot is given back to gradient")
    world.silent = lambda event: False
    world.until(lambda: world.state(B1) == (S.IDLE, S.TRAINING))


def test_a_slot_without_work_has_joined_all_the_same():
    world = scene()
    world.order(gradient=1)
    world.arrive()
    world.silent = of((e.EpisodeAdvanced, e.EpisodeStarted))
    world.order(gradient=0)
    in_phase(world, P.JOIN)
    world.time_is_up(B1)
    assert (world.moved(B1).state, world.moved(B1).detail) == ("done", "")


@pytest.mark.parametrize(("phase", "state"), [(P.START, "failed"), (P.JOIN, "done")])
def test_a_run_that_ends_fails_only_the_moves_whose_process_does_not_work_yet(phase, state):
    world = scene()
    world.order(gradient=1)
    world.arrive()
    world.silent = of((e.EpisodeAdvanced, e.EpisodeStarted))
    world.order(gradient=0)
    in_phase(world, phase)
    world.give(e.StopRequested(at_once=True, reason="asked"))
    assert not world.machine.reconciler.moves
    assert world.moved(B1).state == state


def test_requests_of_a_servers_life_long_ago_are_not_its_first():
    world = scene()
    world.order(gradient=1)
    world.arrive()
    assert world.machine.servers.replicas[B1].request_s > 0
    world.silent = of((e.EpisodeAdvanced, e.EpisodeStarted))
    world.order(gradient=0)
    world.until(lambda: world.state(B1)[0] is S.SERVING)
    assert world.move(B1).phase is P.JOIN


def test_a_slot_that_only_waits_for_the_cores_checkpoint_is_not_overdue():
    world = scene()
    world.silent = of(e.CheckpointSaved)
    world.choose(joins_core(world))
    world.until(lambda: world.state(B1)[0] is S.IDLE)
    assert world.move(B1).phase is P.STOP
    world.time_is_up(B1)
    assert world.move(B1).ended_at is None
    world.until(lambda: world.kept)
    world.speak()
    world.arrive()
    assert world.machine.training.slots == ("c/0", "a/0", B1)
    assert world.moved(B1).state == "done"


def test_a_slot_that_cannot_be_freed_for_the_core_leaves_the_core_as_it_is():
    world = scene()
    world.silent = of(e.ServerStopped, B1)
    world.choose(joins_core(world))
    in_phase(world, P.STOP)
    world.time_is_up(B1)
    assert world.moved(B1).state == "failed"
    assert world.machine.reconciler.plan(()).train == ("c/0", "a/0")
    assert world.machine.reconciler.role_of(B1) is Role.ROLLOUT
    world.speak()
    world.until(lambda: world.state(B1)[0] is S.SERVING)


def test_a_core_that_does_not_come_up_in_time_is_stopped_and_the_old_one_comes_back():
    world = scene()
    world.silent = of(e.TrainerStarted)
    world.choose(joins_core(world))
    in_phase(world, P.START)
    world.silent = lambda event: False
    world.time_is_up(B1)
    world.until(lambda: world.machine.training.state is TrainerState.READY)
    assert world.machine.training.slots == ("c/0", "a/0")
    row = world.moved(B1)
    assert row.detail == (
        "the resized trainer did not start: start took longer than 1800 s; "
        "the slot is given back to rollout"
    )
    world.until(lambda: world.state(B1)[0] is S.SERVING)
    world.steps_on()


# -- deaths ---------------------------------------------------------------------------------------


def die(world: Scene, why: str = "killed") -> None:
    world.give(e.WorkerFailed(B1, world.machine.workers.replicas[B1].incarnation, why))


@pytest.mark.parametrize("gpus", [True, False])
def test_a_worker_that_dies_while_joining_fails_the_move_with_its_reason(gpus):
    world = scene(gpus=gpus)
    world.order(gradient=1)
    in_phase(world, P.SYNC)
    die(world, "out of memory")
    left = "is given back to rollout" if gpus else "goes on as rollout"
    assert world.moved(B1).detail == f"out of memory; the slot {left}"
    world.until(lambda: world.state(B1) == (S.SERVING, S.IDLE))
    world.steps_on()


def test_a_slot_whose_worker_failed_may_be_asked_for_one_again():
    world = scene()
    world.order(gradient=1)
    world.arrive()
    for _ in range(MAX_RESTARTS + 1):
        die(world)
        world.until(lambda: world.state(B1)[1] in (S.TRAINING, S.FAILED))
    assert world.state(B1)[1] is S.FAILED
    world.order(gradient=0)
    world.arrive()
    world.order(gradient=1)
    world.arrive()
    assert world.moved(B1).state == "done"
    assert world.state(B1) == (S.IDLE, S.TRAINING)


def test_a_worker_that_dies_in_mid_step_holds_up_nobody():
    world = scene()
    world.order(gradient=1)
    world.arrive()
    sharing(world)
    step = world.machine.training.step
    die(world)
    world.speak()
    assert world.machine.training.step == step + 1
    world.until(lambda: world.state(B1)[1] is S.TRAINING)


def test_a_worker_that_dies_while_leaving_only_leaves_sooner():
    world = scene()
    world.order(gradient=1)
    world.arrive()
    sharing(world)
    world.order(gradient=0)
    in_phase(world, P.DRAIN)
    die(world)
    assert world.state(B1)[1] is S.STOPPING
    world.speak()
    world.arrive()
    assert world.moved(B1).state == "done"
    assert world.state(B1) == (S.SERVING, S.IDLE)


@pytest.mark.parametrize("phase", [P.DRAIN, P.STOP, P.START, P.SYNC])
def test_a_core_that_dies_during_a_move_delays_it_only(phase):
    world = scene()
    world.order(gradient=1)
    in_phase(world, phase)
    world.give(e.TrainerFailed(world.machine.training.incarnation, "killed"))
    world.arrive()
    assert world.moved(B1).state == "done"
    world.steps_on()
    assert world.machine.training.slots == ("c/0", "a/0")


@pytest.mark.parametrize("comes_back", ["with everything", "empty"])
@pytest.mark.parametrize("phase", [P.DRAIN, P.STOP, P.START, P.SYNC, P.JOIN])
def test_a_node_that_is_lost_in_any_phase_costs_at_most_the_move(phase, comes_back):
    world = scene()
    if phase is P.JOIN:
        world.silent = of(e.StepDone)
    world.order(gradient=1)
    in_phase(world, phase)
    world.give(e.NodeLost("b", "cable"))
    everything = {name(slot) for slot in ("b/0", B1) for name in (process_of, worker_of)}
    alive = everything if comes_back == "with everything" else set()
    world.give(e.NodeBack("b", frozenset(alive)))
    world.speak()
    world.arrive()
    row = world.moved(B1)
    assert row.state == "done" or row.detail
    world.steps_on()
    working = (S.SERVING, S.TRAINING)
    world.until(lambda: any(state in working for state in world.state(B1)))
    world.until(lambda: world.state("b/0")[0] is S.SERVING)


@pytest.mark.parametrize("phase", [None, P.STOP])
def test_a_move_on_a_node_that_is_given_up_ends_and_orders_are_taken_again(phase):
    world = scene()
    if phase is None:
        world.give(e.NodeLost("b", "cable"))
    world.order((B1, Role.GRADIENT))
    if phase is not None:
        in_phase(world, phase)
        world.give(e.NodeLost("b", "cable"))
    world.steps_on(1)
    assert set(world.machine.reconciler.moves) == {B1}, "the node may be back in a moment"
    world.give(e.NodeGone("b", "its lease has run out"))
    assert world.moved(B1).state == "failed"
    assert "b is given up" in world.moved(B1).detail
    world.steps_on(1)
    assert world.order((B1, Role.ROLLOUT)).text == "nothing has to move"
    world.give(e.NodeBack("b", frozenset()))
    world.until(lambda: world.state(B1)[0] is S.SERVING)


def test_the_server_that_serves_is_kept_when_no_other_comes_up():
    world = scene()
    plan = world.machine.plan
    shape = dict(plan.servers)
    # b/1 alone serves; then a/1 is to serve in its place, and it is to join the core.
    world.choose(replace(plan, servers=((B1, shape[B1]),)))
    world.arrive()
    world.silent = of(e.ServerStarted, "a/1")
    world.choose(replace(plan, servers=(("a/1", shape[B1]),), train=(*plan.train, B1)))
    in_phase(world, P.START, "a/1")
    assert world.state(B1)[0] is S.SERVING
    world.silent = lambda event: False
    world.give(
        e.ServerFailed("a/1", world.machine.servers.replicas["a/1"].incarnation, "no memory")
    )
    world.arrive()
    assert world.state(B1)[0] is S.SERVING
    assert world.machine.reconciler.plan(()) == replace(
        plan, servers=((B1, shape[B1]),), reasons=()
    )
    assert world.moved(B1).detail == (
        "b/1 has the last server, and no other came up; the slot goes on as rollout"
    )


def test_a_plan_that_comes_when_the_run_ends_moves_nothing():
    world = scene()
    world.give(e.StopRequested(False, "asked"))
    assert world.order(gradient=1) == a.AnswerOrder("order-0", False, "the run is ending")
    world.choose(joins_core(world))
    assert not world.machine.reconciler.moves


def test_when_the_only_server_cannot_be_started_again_another_slot_serves():
    world = scene()
    world.order(gradient=2)
    world.arrive()
    (slot,) = dict(world.machine.reconciler.plan(()).servers)
    servers = world.machine.servers
    for _ in range(MAX_RESTARTS + 1):
        world.give(e.ServerFailed(slot, servers.replicas[slot].incarnation, "killed"))
        world.until(lambda: servers.replicas[slot].state in (S.SERVING, S.FAILED))
    assert servers.replicas[slot].state is S.FAILED
    world.until(lambda: any(s.state is S.SERVING for s in servers.replicas.values()))
    world.steps_on()


# -- servers that sleep ---------------------------------------------------------------------------


def asleep(world: Scene, slot: str = B1) -> None:
    """Move the slot to training, where its server sleeps then."""
    world.order(gradient=1)
    world.arrive()
    assert world.state(slot) == (S.ASLEEP, S.TRAINING)


def in_sleep(world: Scene, since: int) -> list[type]:
    """The kinds of orders that servers were given since."""
    kinds = (a.StartServer, a.StopServer, a.SleepServer, a.WakeServer)
    return [type(action) for action in world.log[since:] if isinstance(action, kinds)]


@pytest.mark.parametrize("gpus", [True, False])
def test_a_server_that_sleeps_is_woken_and_loads_the_newest_version(gpus):
    world = scene(gpus=gpus, sleep=True)
    before = len(world.log)
    asleep(world)
    there = world.phases(B1)
    incarnation = world.machine.servers.replicas[B1].incarnation
    world.steps_on(2)
    world.order(gradient=0)
    world.arrive()
    assert in_sleep(world, before) == [a.SleepServer, a.WakeServer]
    server = world.machine.servers.replicas[B1]
    assert (server.state, server.incarnation, server.restarts) == (S.SERVING, incarnation, 0)
    assert server.verified is not None
    assert server.verified.version.step >= world.machine.training.step - 1
    assert world.moved(B1).state == "done"
    assert world.phases(B1) in (there, [phase for phase in there if phase != "drain"])


def test_on_gpus_a_worker_starts_once_the_server_sleeps_and_it_wakes_once_the_worker_is_gone():
    world = scene(gpus=True, sleep=True)
    world.silent = of(e.ServerAsleep, B1)
    world.order(gradient=1)
    world.until(lambda: world.kept)
    assert world.state(B1) == (S.FALLING_ASLEEP, S.IDLE)
    world.speak()
    world.arrive()
    world.silent = of(e.WorkerStopped, B1)
    world.order(gradient=0)
    world.until(lambda: world.kept)
    assert world.state(B1) == (S.ASLEEP, S.STOPPING)
    world.speak()
    world.arrive()
    assert world.state(B1) == (S.SERVING, S.IDLE)


def test_status_tells_that_a_server_sleeps_where_a_worker_works():
    world = scene(sleep=True)
    asleep(world)
    row = [row for row in world.rows(SlotRecord) if row.slot == B1][-1]
    assert (row.role, row.state, row.detail) == (Role.GRADIENT, "training", "its server is asleep")


@pytest.mark.parametrize("kind", [e.ServerAsleep, e.ServerStarted])
def test_a_server_that_cannot_sleep_or_wake_is_ended_and_the_slot_moves_all_the_same(kind):
    world = scene(sleep=True)
    if kind is e.ServerStarted:
        asleep(world)
    before, world.silent = len(world.log), of(kind, B1)
    world.order(gradient=int(kind is e.ServerAsleep))
    world.until(lambda: world.kept)
    assert world.kept
    world.kept, world.silent = [], lambda event: False
    incarnation = world.machine.servers.replicas[B1].incarnation
    world.give(e.ServerFailed(B1, incarnation, "out of memory"))
    world.arrive()
    if kind is e.ServerAsleep:
        assert world.state(B1) == (S.IDLE, S.TRAINING)
        assert in_sleep(world, before) == [a.SleepServer, a.StopServer]
    else:
        world.until(lambda: world.state(B1)[0] in (S.SERVING, S.IDLE))
        assert in_sleep(world, before)[:2] == [a.WakeServer, a.StopServer]


def test_a_server_that_dies_in_its_sleep_is_a_cold_start_and_disturbs_nobody():
    world = scene(sleep=True)
    asleep(world)
    before = len(world.log)
    incarnation = world.machine.servers.replicas[B1].incarnation
    world.give(e.ServerFailed(B1, incarnation, "killed"))
    world.steps_on(1)
    assert world.state(B1) == (S.IDLE, S.TRAINING)
    world.order(gradient=0)
    world.arrive()
    assert world.state(B1) == (S.SERVING, S.IDLE)
    assert in_sleep(world, before) == [a.StopServer, a.StartServer]


def test_a_server_of_another_shape_comes_once_the_one_that_sleeps_is_gone():
    world = scene(sleep=True)
    shape = dict(world.machine.plan.servers)
    asleep(world)
    before = len(world.log)
    smaller = replace(shape[B1], max_num_seqs=2)
    world.choose(
        replace(world.machine.plan, servers=tuple({**shape, B1: smaller}.items()), gradient=())
    )
    world.arrive()
    assert world.machine.servers.replicas[B1].bucket == smaller
    assert in_sleep(world, before) == [a.StopServer, a.StartServer]


def test_a_run_that_ends_ends_the_servers_that_sleep():
    world = scene(sleep=True)
    asleep(world)
    world.give(e.StopRequested(at_once=False, reason="asked"))
    world.until(lambda: world.end)
    assert B1 in {stop.slot for stop in world.did(a.StopServer)}


def test_an_answer_of_an_earlier_sleep_is_none_of_this_one():
    world = scene(sleep=True)
    asleep(world)
    old = e.ServerAsleep(B1, world.machine.servers.replicas[B1].incarnation)
    world.order(gradient=0)
    world.arrive()
    world.silent = of(e.ServerAsleep, B1)
    world.order(gradient=1)
    world.until(lambda: world.kept)
    world.give(old)
    assert world.state(B1)[0] is S.FALLING_ASLEEP
