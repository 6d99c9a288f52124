"""A slot whose GPU is lost is given up at once, and the rest of the run goes on."""

from __future__ import annotations

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.cluster.restarts import LATER_S, told_of
from libra_cli.core.cluster.trainer_life import TrainerLife, TrainerState
from libra_cli.core.notices import ResizeRefused
from libra_cli.core.records import NoteRecord, SlotRecord
from libra_cli.core.types import LostGpu, Pool, Role, Slot, SlotId
from tests.elastic import Scene, of, scene

A0 = "a/0"
HEAD_FIRST = [("h", 0), ("a", 0), ("h", 1)]


def lost(slot: SlotId) -> LostGpu:
    """The GPU of a slot of the scene, which has one."""
    node, _, number = slot.partition("/")
    return LostGpu(node, int(number), f"GPU-{node}-{number}")


def lose(world: Scene, slot: SlotId) -> None:
    """The server there dies, and when it is stopped its GPU is gone."""
    server = world.machine.servers.replicas[slot]
    world.silent = of(e.ServerStopped, slot)
    world.give(e.ServerFailed(slot, server.incarnation, "CUDA error"))
    world.until(lambda: world.kept)
    (stopped,) = world.kept
    assert isinstance(stopped, e.ServerStopped)
    world.silent, world.kept = (lambda event: False), []
    world.give(e.ServerStopped(slot, stopped.incarnation, (lost(slot),)))


def lose_of_trainer(world: Scene, *slots: SlotId) -> None:
    """The trainer dies, and when it is stopped the GPUs of these slots are gone."""
    world.silent = of(e.TrainerStopped)
    world.give(e.TrainerFailed(world.machine.training.incarnation, "CUDA error"))
    world.until(lambda: world.kept)
    (stopped,) = world.kept
    assert isinstance(stopped, e.TrainerStopped)
    world.silent, world.kept = (lambda event: False), []
    world.give(e.TrainerStopped(stopped.incarnation, tuple(map(lost, slots))))


def starts(world: Scene, slot: SlotId) -> int:
    return sum(start.slot == slot for start in world.did(a.StartServer))


def row(world: Scene, slot: SlotId) -> SlotRecord:
    rows: list[SlotRecord] = world.rows(SlotRecord)
    return [row for row in rows if row.slot == slot][-1]


def note(world: Scene) -> str:
    notes: list[NoteRecord] = world.rows(NoteRecord)
    return [note.text for note in notes if note.kind == "slot"][-1]


def test_a_server_is_not_started_on_a_lost_gpu_and_costs_nothing_of_its_budget():
    world = scene()
    server = world.machine.servers.replicas["b/0"]
    before = starts(world, "b/0")
    lose(world, "b/0")
    assert server.state is ReplicaState.FAILED
    assert (server.restarts, server.budget.wait_s()) == (0, 0.0), "no death counts"
    told = row(world, "b/0")
    assert (told.state, told.role) == ("failed", Role.FAILED)
    assert told.detail == told_of([lost("b/0")])
    assert note(world) == (
        f"b/0: {told.detail} (CUDA error); it is tried again in 30 min; libra logs b says more"
    )
    world.steps_on()
    assert starts(world, "b/0") == before
    assert world.state("b/1") == (ReplicaState.SERVING, None), "its neighbour goes on"


def test_it_is_tried_again_after_half_an_hour_and_serves_if_the_gpu_is_back():
    world = scene()
    server = world.machine.servers.replicas["b/0"]
    lose(world, "b/0")
    given_up = world.now
    world.until(lambda: server.state is not ReplicaState.FAILED)
    assert world.now - given_up >= LATER_S
    world.until(lambda: server.state is ReplicaState.SERVING)
    assert note(world) == "b/0 is tried again"
    world.give(e.ServerFailed("b/0", server.incarnation, "killed"))
    world.until(lambda: server.state is ReplicaState.SERVING)
    assert server.restarts == 1, "what was lost once is forgotten at the next end"


def test_a_worker_on_a_lost_gpu_is_given_up_too():
    world = scene()
    assert world.order(("a/1", Role.GRADIENT), gradient=1).accepted
    world.arrive()
    worker = world.machine.workers.replicas["a/1"]
    world.silent = of(e.WorkerStopped)
    world.give(e.WorkerFailed("a/1", worker.incarnation, "CUDA error"))
    world.until(lambda: world.kept)
    world.silent = lambda event: False
    world.give(e.WorkerStopped("a/1", worker.incarnation, (lost("a/1"),)))
    assert worker.state is ReplicaState.FAILED
    world.steps_on()
    assert worker.state is ReplicaState.FAILED


def test_a_run_whose_only_server_has_lost_its_gpu_ends_and_says_what_to_type():
    world = scene()
    for slot in ("a/1", "b/1", "b/0"):
        lose(world, slot)
    world.until(lambda: world.end)
    assert world.end is not None
    assert world.end.state == "failed"
    assert world.end.error.startswith("no server is left: ")
    for word in ("GPU 0 of b (GPU-b-0) is lost", "on b: nvidia-smi -L", "--resume RUN_DIR"):
        assert word in world.end.error


def test_the_trainer_goes_on_with_the_slots_that_are_left():
    world = scene()
    training, plan = world.machine.training, world.machine.plan
    step, incarnation = training.step, training.incarnation
    lose_of_trainer(world, A0)
    assert world.did(a.StartTrainer)[-1].train == ("c/0",), "at once, and without it"
    assert training.incarnation == incarnation + 1
    told = row(world, A0)
    assert (told.state, told.role, told.detail) == ("failed", Role.FAILED, told_of([lost(A0)]))
    assert note(world) == f"{A0}: {told.detail}; the trainer goes on without that slot"
    world.until(lambda: training.state is TrainerState.READY)
    assert training.step >= step - 1
    assert world.machine.plan.train == ("c/0",)
    assert world.machine.plan.servers == plan.servers
    world.steps_on()


def test_nothing_is_planned_for_the_trainer_on_a_lost_gpu_until_its_node_was_given_up():
    world = scene()
    plan = world.machine.plan
    lose_of_trainer(world, A0)
    world.until(lambda: world.machine.training.state is TrainerState.READY)
    world.choose(plan)
    assert world.machine.plan.train == ("c/0",)
    answer = world.order((A0, Role.TRAIN), train=2)
    assert not answer.accepted
    assert answer.text == f"the trainer cannot be on {A0}: its GPU is lost"
    assert world.order((A0, None), ("a/1", Role.TRAIN), train=2).accepted, "other slots may join"
    world.arrive()
    assert world.machine.training.slots == ("c/0", "a/1")
    slot = Slot(A0, "a", (0,), Pool.HYBRID)
    life = world.machine.training.life
    world.give(e.NodeLost("a", "reboot"))
    world.give(e.NodeBack("a", frozenset({"server-0"})))
    assert life.has_lost(slot), "a cable mends no GPU"
    world.give(e.NodeLost("a", "reboot"))
    world.give(e.NodeGone("a", "reboot"))
    world.give(e.NodeBack("a", frozenset()))
    assert not life.has_lost(slot)


@pytest.mark.parametrize("slots", [("c/0",), ("c/0", A0)])
def test_a_trainer_without_a_gpu_on_the_node_that_publishes_ends_the_run(slots):
    world = scene()
    started = len(world.did(a.StartTrainer))
    lose_of_trainer(world, *slots)
    assert world.machine.training.state is TrainerState.FAILED
    world.until(lambda: world.end)
    assert world.end is not None
    assert world.end.error.startswith("the trainer failed: GPU 0 of c (GPU-c-0)")
    assert world.end.error.endswith("; mend that, then: libra run RECIPE --resume RUN_DIR")
    assert len(world.did(a.StartTrainer)) == started


def test_a_gpu_lost_while_the_trainer_moves_leaves_it_where_it_has_worked():
    world = scene()
    world.silent = of(e.TrainerStarted)
    assert world.order(train=3).accepted
    world.until(lambda: world.kept)
    (new,) = set(world.machine.training.slots) - {"c/0", A0}
    world.kept = []
    lose_of_trainer(world, new)
    world.until(lambda: world.machine.training.state is TrainerState.READY)
    assert world.machine.training.slots == ("c/0", A0)
    assert note(world) == f"{new}: {told_of([lost(new)])}; the trainer goes on without that slot"
    world.steps_on()


def test_what_is_lost_is_told_with_its_hosts_once_each():
    assert told_of([]) == ""
    several = told_of([lost("b/0"), lost("b/1")])
    assert several.startswith("GPU 0 of b (GPU-b-0), GPU 1 of b (GPU-b-1) are lost; on b: ")


def test_rank_0_stays_on_its_node_whichever_slot_of_it_is_left():
    slots = [Slot(f"{node}/{gpu}", node, (gpu,), Pool.TRAIN) for node, gpu in HEAD_FIRST]
    life = TrainerLife(slots)
    life.start("", now=0.0)
    life.started(now=1.0)
    life.stop("CUDA error", now=2.0)
    told = life.gone("step-2", [LostGpu("h", 0, "GPU-h-0")], now=3.0)
    assert life.slots == ("h/1", "a/0")
    assert a.StartTrainer(2, ("h/1", "a/0"), "step-2") in told
    assert ResizeRefused(life.detail) in told
    assert not any(isinstance(one, a.Wake) for one in told), "at once"


def test_a_trainer_that_moved_onto_a_lost_gpu_is_back_on_all_that_it_had():
    old = [Slot(f"h/{gpu}", "h", (gpu,), Pool.TRAIN) for gpu in (0, 1)]
    new = Slot("h/2", "h", (2,), Pool.TRAIN)
    life = TrainerLife(old)
    life.start("", now=0.0)
    life.started(now=1.0)
    life.next = [old[0], new]
    life.stop("the trainer is resized", now=2.0)
    life.gone("step-1", now=3.0)
    assert life.slots == ("h/0", "h/2")
    life.stop("CUDA error", now=4.0)
    life.gone("step-1", [LostGpu("h", 2, "GPU-h-2")], now=5.0)
    assert life.slots == ("h/0", "h/1")


def test_a_trainer_that_is_wound_down_is_not_started_on_what_is_left():
    life = TrainerLife([Slot(f"h/{gpu}", "h", (gpu,), Pool.TRAIN) for gpu in (0, 1)])
    life.start("", now=0.0)
    life.wind_down()
    life.stop("the run ends", now=2.0)
    told = life.gone("", [LostGpu("h", 0, "GPU-h-0")], now=3.0)
    assert life.state is TrainerState.DOWN
    assert not any(isinstance(one, a.StartTrainer) for one in told)
