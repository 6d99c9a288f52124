"""What the controller after a killed one does first: connect to what runs, say what does not, and
ask again for what was asked for and has not ended.

Which actions are asked again follows from the machine, after it knows what is left: one that
nobody waits for any more is dropped. Those that are asked again may be: an agent knows the process
it has started, a server loads a version once, the trainer knows the batch it has taken, and a turn
whose reply went with the controller is generated once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from libra_cli.config.errors import LibraError
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import Replica, ReplicaState
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.launch.process import model_of, process_of, worker_of
from libra_cli.core.rollout.active import Stage
from libra_cli.core.rollout.groups import GroupState
from libra_cli.core.run.machine import Machine
from libra_cli.core.types import Seconds, Slot, SlotId
from libra_cli.runtime.adoption.memory import RunMemory
from libra_cli.runtime.adoption.run_log import ReplayedRun
from libra_cli.runtime.frozen.processes import ModelProcesses
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.trainer.processes import TrainerProcesses
from libra_cli.runtime.trainer.worker_processes import WorkerProcesses

_CONNECTED = (
    ReplicaState.JOINING,
    ReplicaState.SERVING,
    ReplicaState.TRAINING,
    ReplicaState.DRAINING,
    ReplicaState.FALLING_ASLEEP,
    ReplicaState.ASLEEP,
    ReplicaState.WAKING,
)
"""A process that is starting is connected to by the action that starts it."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """A run that was brought to where it was, and the processes of it that run, by node."""

    replayed: ReplayedRun
    running: Mapping[str, frozenset[str] | None]

    @property
    def end(self) -> a.End | None:
        """How the run ended, if it had before its controller was killed; None while it goes on."""
        run = self.replayed.machine.run
        return a.End(run.outcome, run.error) if run.ended_at is not None else None

    @property
    def told(self) -> str:
        """A sentence for people: after which step the run goes on, and with what."""
        machine = self.replayed.machine
        processes = sum(len(names or ()) for names in self.running.values())
        ready = machine.ledger.count(GroupState.READY)
        return (
            f"goes on where it was, after step {machine.training.step}: adopted {processes} "
            f"processes, {len(machine.rollout.active)} trajectories in play and {ready} groups "
            "that wait for training"
        )


def slots_of_machine(machine: Machine) -> dict[SlotId, Slot]:
    """Return every slot that a process of the machine's run may be on, by its id."""
    training = machine.training
    sets = (machine.servers, machine.workers, machine.models)
    replicas = [replica for some in sets for replica in some.replicas.values()]
    slots = [replica.slot for replica in (*replicas, *training.replicas)]
    left = [replica.slot for replica in training.life.previous]
    every = (*machine.reconciler.slots, *slots, *training.life.reserved, *left)
    return {slot.id: slot for slot in every}


async def connect(
    machine: Machine,
    memory: RunMemory,
    *,
    servers: Servers,
    workers: WorkerProcesses,
    models: ModelProcesses,
    trainer: TrainerProcesses,
) -> list[e.Event]:
    """Connect to every process that worked; returns the failures of those that cannot be."""
    failed: list[e.Event] = []
    for replica in _connectable(machine.servers.replicas.values()):
        slot, incarnation, bucket = replica.slot.id, replica.incarnation, replica.bucket
        assert bucket is not None, f"{slot} serves"
        try:
            await servers.adopt(a.StartServer(slot, incarnation, bucket))
        except LibraError as error:
            failed.append(e.ServerFailed(slot, incarnation, str(error)))
    for replica in _connectable(machine.workers.replicas.values()):
        start = a.StartWorker(replica.slot.id, replica.incarnation)
        try:
            await workers.adopt(start, replica.verified)
        except LibraError as error:
            failed.append(e.WorkerFailed(start.slot, start.incarnation, str(error)))
    for replica in _connectable(machine.models.replicas.values()):
        models.begin(a.StartModel(replica.slot.id, replica.incarnation, replica.model))
    return [*failed, *await _connect_trainer(machine, memory, trainer)]


def _connectable(replicas: Iterable[Replica]) -> list[Replica]:
    return [replica for replica in replicas if replica.state in _CONNECTED]


async def _connect_trainer(
    machine: Machine, memory: RunMemory, trainer: TrainerProcesses
) -> list[e.Event]:
    training = machine.training
    if training.state in (TrainerState.DOWN, TrainerState.FAILED, TrainerState.STARTING):
        return []
    # A checkpoint that comes with a step, or is asked for now, is waited for by that action.
    asked = any(
        isinstance(one.action, (a.Train, a.Checkpoint)) and one.action.ledger is not None
        for one in memory.asked.values()
    )
    works = training.state is not TrainerState.STOPPING
    writing = works and training.checkpoints.writing and not asked
    try:
        await trainer.adopt(
            a.StartTrainer(training.incarnation, training.slots, training.checkpoints.path),
            versions=range(training.published_step + 1, training.step + 1) if works else (),
            checkpoint=training.checkpoints.newest if writing else None,
        )
    except LibraError as error:
        return [e.TrainerFailed(training.incarnation, str(error))]
    return []


def findings(
    machine: Machine, memory: RunMemory, running: Mapping[str, frozenset[str] | None]
) -> Iterator[e.Event]:
    """What has happened to the run's processes meanwhile: ``running`` are their names, by node;
    None where everything was stopped."""
    trainer = _trainer_processes(machine)
    for node, names in running.items():
        if names is None:
            yield e.NodeGone(node, "its lease was over before another controller came")
        yield e.NodeBack(node, (names or frozenset()) | _starting(machine, memory, node))
    dead = [
        f"{process} on {node}"
        for node, process in trainer
        if process not in (running.get(node) or ())
    ]
    if dead and not _is_starting_trainer(memory):
        why = f"{', '.join(dead)} ended while the run had no controller"
        yield e.TrainerFailed(machine.training.incarnation, why)


def _starting(machine: Machine, memory: RunMemory, node: str) -> set[str]:
    """Processes there whose start was asked for: whoever asks again hears how they are."""
    names = set()
    for asked in memory.asked.values():
        if isinstance(asked.action, a.StartServer):
            names.add((asked.action.slot, process_of(asked.action.slot)))
        elif isinstance(asked.action, a.StartWorker):
            names.add((asked.action.slot, worker_of(asked.action.slot)))
        elif isinstance(asked.action, a.StartModel):
            names.add((asked.action.slot, model_of(asked.action.slot)))
    slots = slots_of_machine(machine)
    return {name for slot, name in names if slot in slots and slots[slot].node == node}


def _is_starting_trainer(memory: RunMemory) -> bool:
    return any(isinstance(asked.action, a.StartTrainer) for asked in memory.asked.values())


def _trainer_processes(machine: Machine) -> list[tuple[str, str]]:
    """Node and name of the trainer's processes, as far as it has any."""
    training = machine.training
    if training.state in (TrainerState.DOWN, TrainerState.FAILED, TrainerState.STOPPING):
        return []
    nodes = dict.fromkeys(replica.slot.node for replica in training.replicas)
    return [(node, f"trainer-{rank}") for rank, node in enumerate(nodes)]


def replayed_from_prompt(machine: Machine) -> list[e.EpisodeFailed]:
    """Return a failure for each trajectory that an agent was playing: nothing of it can be rebuilt,
    so it begins again, at no cost. One that is over and waits for a teacher needs no agent.
    """
    why = "its agent went with the controller"
    return [
        e.EpisodeFailed(trajectory, why, counts=False)
        for trajectory, active in machine.rollout.active.items()
        if active.stage not in (Stage.RESETTING, Stage.TAUGHT)
    ]


def asked_again(
    machine: Machine, memory: RunMemory, last: int, *, now: Seconds
) -> list[tuple[int, a.RuntimeAction]]:
    """What was asked for, is still waited for and has not ended, up to number ``last``.

    What nobody waits for any more is forgotten.
    """
    again = []
    for number, asked in list(memory.asked.items()):
        action = asked.action
        if number > last:
            break
        if not machine.wants(action):
            del memory.asked[number]
            continue
        if isinstance(action, a.Wake):
            action = replace(action, after_s=max(0.0, asked.at + action.after_s - now))
        again.append((number, action))
    return again
