"""What the runtime is to do, in the imperative. Every action ends in the event it names, if any."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from libra_cli.core.events import PublishedVersion
from libra_cli.core.observation import Observation
from libra_cli.core.records import Record
from libra_cli.core.types import (
    Branch,
    Bucket,
    Seconds,
    SlotId,
    Tokens,
    Trajectory,
    TrajectoryId,
    Version,
    WeightVersion,
)


@dataclass(frozen=True, slots=True)
class StartServer:
    """Ends in ServerStarted or ServerFailed."""

    slot: SlotId
    incarnation: int
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class CheckServer:
    """Something failed: does it still answer? Ends in ServerChecked or ServerFailed."""

    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class StopServer:
    """Ends in ServerStopped, when no process of it is left."""

    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class SyncServer:
    """Fetch, load in place, label, resume, verify. Ends in ServerSynced or SyncFailed."""

    slot: SlotId
    incarnation: int
    published: PublishedVersion


@dataclass(frozen=True, slots=True)
class StartTrainer:
    """Start every rank; ``resume`` is a checkpoint, or empty. Ends in TrainerStarted or -Failed."""

    incarnation: int
    train: tuple[SlotId, ...]
    resume: str


@dataclass(frozen=True, slots=True)
class StopTrainer:
    """Ends in TrainerStopped."""

    incarnation: int
    train: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A branch of a trajectory as the trainer, which holds version ``held``, takes it.

    ``fresh``: its log-probabilities are comparable with the trainer's. ``advantages`` are (token,
    value): from this token on this advantage, 0 before the first. ``branch`` is the number; None:
    the one whose tokens are the trajectory's own. ``token_advantages``, one a token, stand in place
    of ``advantages`` where they are given. ``turns`` are (number, token, reward), of a branch whose
    advantages a critic in the trainer estimates.
    """

    trajectory: Trajectory
    held: Version
    fresh: bool
    advantages: tuple[tuple[int, float], ...]
    branch: int | None = None
    token_advantages: array[float] | None = None
    turns: tuple[tuple[int, int, float], ...] = ()

    @property
    def tokens(self) -> Branch:
        """Its tokens."""
        trajectory = self.trajectory
        return trajectory if self.branch is None else trajectory.others[self.branch]

    @property
    def staleness(self) -> int:
        """How many versions its oldest token is behind."""
        return max((behind for behind, _, _ in self.tokens.behind(self.held)), default=0)


def without_advantage(sample: TrainSample) -> TrainSample:
    """The same sample as one that has exactly the reward that it is compared with."""
    return replace(sample, advantages=(), token_advantages=None, turns=())


@dataclass(frozen=True, slots=True)
class BatchPartition:
    """What a worker computes the gradients of; the trainer can always do it too."""

    slot: SlotId
    incarnation: int
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """One optimizer step on a batch. ``ledger`` asks for a checkpoint after it.

    ``samples`` are those not accumulated before in ``parts`` parts; ``shares`` are of these, and
    computed with ``held``, the version that the trainer holds. Ends in StepDone or TrainerFailed;
    after StepDone, its version ends in VersionPublished and a checkpoint in CheckpointSaved or
    CheckpointFailed.
    """

    incarnation: int
    step: int
    samples: tuple[TrainSample, ...]
    ledger: dict[str, Any] | None
    held: WeightVersion
    parts: int = 0
    shares: tuple[BatchPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Gradients of a part (from 1) of a step's batch. Ends in Accumulated or TrainerFailed."""

    incarnation: int
    step: int
    part: int
    samples: tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class StartWorker:
    """A gradient worker on the slot. Ends in WorkerStarted or WorkerFailed."""

    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class SyncWorker:
    """Fetch, load, verify. Ends in WorkerSynced, WorkerSyncFailed or WorkerFailed."""

    slot: SlotId
    incarnation: int
    published: PublishedVersion


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Ends in WorkerStopped, when no process of it is left."""

    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class AbortTurn:
    """End a generation now; its reply comes with what it has (finish reason ``abort``)."""

    request: int
    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Propose:
    """What plan should this run have? ``planner.answer`` says; ends in PlanChosen or PlanKept."""

    why: str
    observation: Observation
    order: str = ""


@dataclass(frozen=True, slots=True)
class AnswerOrder:
    """Tell whoever gave the order what became of it."""

    order: str
    accepted: bool
    text: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Ends in CheckpointSaved, CheckpointFailed or TrainerFailed."""

    incarnation: int
    step: int
    ledger: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StartEpisode:
    """Ends in EpisodeStarted, DemonstrationRead or EpisodeFailed. ``task`` is the task's place in
    the prompt stream; None: the group's number."""

    trajectory: TrajectoryId
    task: int | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    """Ends in TurnGenerated or TurnFailed. Lower ``priority`` goes first in the server's queue."""

    request: int
    """Never used twice in a run, so that a reply that comes twice or late is recognised."""
    trajectory: TrajectoryId
    slot: SlotId
    incarnation: int
    prompt_ids: array[int]
    max_tokens: Tokens
    cache_key: WeightVersion
    priority: int


@dataclass(frozen=True, slots=True)
class AdvanceEpisode:
    """Give the environment the generated turn. Ends in EpisodeAdvanced or EpisodeFailed."""

    trajectory: TrajectoryId
    token_ids: array[int]
    finish_reason: str
    logprobs: array[float]


@dataclass(frozen=True, slots=True)
class FinishEpisode:
    """A limit is reached: score what there is. Ends in EpisodeAdvanced (done) or EpisodeFailed."""

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True)
class AskTeacher:
    """How likely does it find these tokens, of each branch that has generated some? Ends in
    TeacherAnswered or TeacherFailed."""

    trajectory: TrajectoryId
    sequences: tuple[array[int], ...]


@dataclass(frozen=True, slots=True)
class ForgetEpisode:
    """The environment of this trajectory is no longer needed."""

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True)
class Wake:
    """Send TimerFired(name) after ``after_s``."""

    name: str
    after_s: Seconds


@dataclass(frozen=True, slots=True)
class Save:
    """Write a record to the journal."""

    record: Record


@dataclass(frozen=True, slots=True)
class End:
    """The run is over and nothing is left running. The last action of a machine."""

    state: str
    error: str


ServerAction: TypeAlias = StartServer | CheckServer | StopServer | SyncServer | Generate | AbortTurn
TrainerAction: TypeAlias = StartTrainer | StopTrainer | Train | Accumulate | Checkpoint
WorkerAction: TypeAlias = StartWorker | SyncWorker | StopWorker
EpisodeAction: TypeAlias = StartEpisode | AdvanceEpisode | FinishEpisode | ForgetEpisode
RuntimeAction: TypeAlias = (
    ServerAction
    | TrainerAction
    | WorkerAction
    | EpisodeAction
    | AskTeacher
    | Propose
    | AnswerOrder
    | Wake
)
"""What the runtime carries out; Save and End are the driver's own."""
Action: TypeAlias = RuntimeAction | Save | End
