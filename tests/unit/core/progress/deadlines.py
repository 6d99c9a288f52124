"""Every state of the lifecycle tables in which something is waited for, and how each wait ends.

A ``Wait`` says what ends a state, how long it may take, and what happens then. A state that waits
for nothing outside (it rests, or only what is played elsewhere moves it) has the reason instead.
Seconds hold for a recipe's defaults; those that are said to be silence count from the last sign of
progress (``core.progress.watch``).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.progress.phases import LONGEST_S
from libra_cli.core.progress.watch import FOUND_S
from libra_cli.core.reconcile.migration import LIFECYCLE, MigrationPhase
from libra_cli.core.rollout.active import Stage
from libra_cli.core.rollout.groups import GroupState
from libra_cli.core.run.course import DRAIN_S
from libra_cli.core.run.state import Phase
from libra_cli.core.types import Seconds

START_S: Seconds = 1800.0
"""A model of any size on a cold file system, until the process is ready."""
TURN_S: Seconds = 1800.0
"""A whole turn, of a server that generates others meanwhile."""
TRANSFER_S: Seconds = 120.0
"""Without a byte of a version (``weight_sync.timeout_s``)."""
SLEEP_S: Seconds = 120.0
"""Until a server has given back its memory, or has it again."""
LEASE_S: Seconds = 120.0
"""``run.lease_s``: a host that is not heard of for so long has stopped everything."""
STOP_S: Seconds = LEASE_S + 10.0
"""A process that ends neither by itself nor by SIGKILL is one of a host that is away."""
CALL_S: Seconds = 10.0
"""A call to an environment (``environment.tool_timeout_s``)."""
TEACHER_S: Seconds = 1800.0
"""Without any answer of the teacher (``teacher.patience_s``)."""


class Wait(NamedTuple):
    """A state that waits: what ends it, within how long, and what happens else."""

    ended_by: str
    deadline_s: Seconds
    otherwise: str


State: TypeAlias = Wait | str
"""How the wait ends, or why there is none."""

_STOPPING = Wait(
    "the host's agent says that no process is left",
    STOP_S,
    "the host is given up: its lease has stopped what ran there",
)

WAITS: Mapping[type[StrEnum], Mapping[Any, State]] = {
    ReplicaState: {
        ReplicaState.IDLE: "nothing runs; the plan may give it something",
        ReplicaState.STARTING: Wait("it is ready, or ends", START_S, "it has failed"),
        ReplicaState.JOINING: Wait(
            "it has proved the version",
            TRANSFER_S,
            "silence of the transfer is a failed sync, silence of the process its failure",
        ),
        ReplicaState.SERVING: Wait(
            "it shows progress while turns are inside, and answers while none is",
            FOUND_S,
            "it is taken out; its turns go on elsewhere",
        ),
        ReplicaState.DRAINING: Wait(
            LIFECYCLE[MigrationPhase.DRAIN].cause,
            LIFECYCLE[MigrationPhase.DRAIN].deadline_s,
            LIFECYCLE[MigrationPhase.DRAIN].otherwise,
        ),
        ReplicaState.TRAINING: Wait(
            "each of its ranks beats, and goes on by the deadline of its phase",
            FOUND_S,
            "the worker, or the trainer, has failed",
        ),
        ReplicaState.FALLING_ASLEEP: Wait(
            "it has given back weights and KV cache", SLEEP_S, "its process is stopped"
        ),
        ReplicaState.ASLEEP: "it serves nothing; a plan or the run's end may wake or stop it",
        ReplicaState.WAKING: Wait("it has room for them again", SLEEP_S, "it has failed"),
        ReplicaState.STOPPING: _STOPPING,
        ReplicaState.FAILED: "nothing runs; a new plan or a host that is back may try again",
    },
    TrainerState: {
        TrainerState.DOWN: Wait(
            "its pause before a restart is over, and its nodes are there", 3600.0, "it is given up"
        ),
        TrainerState.STARTING: Wait("every rank is there", START_S, "the trainer has failed"),
        TrainerState.READY: "it has no batch; what plays one has deadlines of its own",
        TrainerState.BUSY: Wait(
            "the step is done, or the part accumulated",
            LONGEST_S,
            "silence of a rank is the failure of the trainer: 60 s if it is stopped, else by its "
            "phase",
        ),
        TrainerState.STOPPING: _STOPPING,
        TrainerState.FAILED: "the run ends",
    },
    Stage: {
        Stage.RESETTING: Wait("the environment has begun", CALL_S, "the attempt has failed"),
        Stage.WAITING: "no server has a seat; each of them has deadlines, and the last that is "
        "given up ends the run",
        Stage.GENERATING: Wait("the turn has ended", TURN_S, "the turn is generated elsewhere"),
        Stage.ADVANCING: Wait("the environment answers", CALL_S, "the call has timed out"),
        Stage.TAUGHT: Wait("the teacher answers", TEACHER_S, "the run ends as failed"),
    },
    MigrationPhase: {
        phase: Wait(edge.cause, edge.deadline_s, edge.otherwise)
        for phase, edge in LIFECYCLE.items()
    },
    GroupState: {
        GroupState.OPEN: "its members are played; each of their stages has a deadline",
        GroupState.READY: "the trainer takes it, or it grows too old",
        GroupState.CLAIMED: Wait("the step is done", LONGEST_S, "the trainer has failed"),
        GroupState.TRAINED: "nothing but a trainer that goes back may want it",
        GroupState.FILTERED: "it is over",
        GroupState.DROPPED: "it is over",
        GroupState.STALE: "it is over",
    },
    Phase: {
        Phase.STARTING: Wait("a server may be sent requests", START_S, "its start has failed"),
        Phase.RUNNING: "everything that is played and trained has deadlines of its own",
        Phase.DRAINING: Wait(
            "nothing is under way: turns within 30 s, a step by the deadlines of its ranks",
            max(DRAIN_S, LONGEST_S),
            "turns are given up, and a rank that does not go on is the trainer's failure",
        ),
        Phase.STOPPING: _STOPPING,
        Phase.ENDED: "it is over",
    },
}
"""By lifecycle table, of every state."""
