"""What the runtime is to do, in the imperative. Every action ends in the event it names, if any.

An action that could not be carried out, because something raised that nobody expected, ends in what
its ``failed`` gives: the failure of one server, turn, episode or worker, or of the trainer. The
machine then does what it does when one of these fails in an expected way, and the run goes on.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from libra_cli.core import events as e
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
    kv_key,
)


class ActionBase:
    """An action that the runtime carries out, and the event that ends it if it fails."""

    __slots__ = ()

    must_end: ClassVar[bool] = False
    """Whether the machine waits for this action and no event reports its failure, as where a
    process is either gone or not: the driver then carries it out again.
    """

    def failed(self, reason: str) -> e.Event | None:
        """Return the event that reports the failure; None where the machine waits for no event."""
        return None


@dataclass(frozen=True, slots=True)
class StartServer(ActionBase):
    """Start a vLLM server. Ends in ServerStarted or ServerFailed."""

    slot: SlotId
    incarnation: int
    bucket: Bucket

    def failed(self, reason: str) -> e.ServerFailed:
        return e.ServerFailed(self.slot, self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class CheckServer(ActionBase):
    """Ask a server whether it still answers, after something failed.

    Ends in ServerChecked or ServerFailed.
    """

    slot: SlotId
    incarnation: int

    def failed(self, reason: str) -> e.ServerFailed:
        return e.ServerFailed(self.slot, self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class StopServer(ActionBase):
    """Stop a server. Ends in ServerStopped, when none of its processes is left."""

    must_end: ClassVar[bool] = True
    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class SleepServer(ActionBase):
    """Have a server without turns give back its weights and KV cache, and keep its process, whose
    number is ``incarnation`` from now on.

    Ends in ServerAsleep or ServerFailed.
    """

    slot: SlotId
    incarnation: int

    def failed(self, reason: str) -> e.ServerFailed:
        return e.ServerFailed(self.slot, self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class WakeServer(ActionBase):
    """Have a sleeping server take memory again; a version must be loaded next.

    Ends in ServerStarted or ServerFailed.
    """

    slot: SlotId
    incarnation: int

    def failed(self, reason: str) -> e.ServerFailed:
        return e.ServerFailed(self.slot, self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class SyncServer(ActionBase):
    """Let a server fetch a version, load it in place, resume and prove it.

    Ends in ServerSynced or SyncFailed.
    """

    slot: SlotId
    incarnation: int
    published: e.PublishedVersion

    def failed(self, reason: str) -> e.SyncFailed:
        """Return a failure that the server itself answered: it is
        tried once more, then in a new process.
        """
        return e.SyncFailed(self.slot, self.incarnation, self.published, reason, answered=True)


@dataclass(frozen=True, slots=True)
class StartTrainer(ActionBase):
    """Start every rank; ``resume`` is a checkpoint, or empty. Ends in TrainerStarted or -Failed."""

    incarnation: int
    train: tuple[SlotId, ...]
    resume: str

    def failed(self, reason: str) -> e.TrainerFailed:
        return e.TrainerFailed(self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class StopTrainer(ActionBase):
    """Stop every rank of the trainer. Ends in TrainerStopped."""

    must_end: ClassVar[bool] = True
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
        trajectory = self.trajectory
        return trajectory if self.branch is None else trajectory.others[self.branch]

    @property
    def staleness(self) -> int:
        """Versions between the oldest generated token's and the one that the trainer holds."""
        return max((behind for behind, _, _ in self.tokens.behind(self.held)), default=0)


def without_advantage(sample: TrainSample) -> TrainSample:
    """Return the same sample with advantage 0, as one with exactly the reward of its baseline."""
    return replace(sample, advantages=(), token_advantages=None, turns=())


@dataclass(frozen=True, slots=True)
class BatchPartition:
    """The trajectories whose gradients a worker computes; the
    trainer can always compute them too.
    """

    slot: SlotId
    incarnation: int
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class Train(ActionBase):
    """Take an optimizer step on a batch. ``ledger`` asks for a checkpoint after it.

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

    def failed(self, reason: str) -> e.TrainerFailed:
        return e.TrainerFailed(self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class Accumulate(ActionBase):
    """Compute the gradients of a part (from 1) of a step's batch.

    Ends in Accumulated or TrainerFailed.
    """

    incarnation: int
    step: int
    part: int
    samples: tuple[TrainSample, ...]

    def failed(self, reason: str) -> e.TrainerFailed:
        return e.TrainerFailed(self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class StartWorker(ActionBase):
    """A gradient worker on the slot. Ends in WorkerStarted or WorkerFailed."""

    slot: SlotId
    incarnation: int

    def failed(self, reason: str) -> e.WorkerFailed:
        return e.WorkerFailed(self.slot, self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class SyncWorker(ActionBase):
    """Let a worker fetch a version, load it and prove it.

    Ends in WorkerSynced, WorkerSyncFailed or WorkerFailed.
    """

    slot: SlotId
    incarnation: int
    published: e.PublishedVersion

    def failed(self, reason: str) -> e.WorkerFailed:
        return e.WorkerFailed(self.slot, self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class StopWorker(ActionBase):
    """Stop a gradient worker. Ends in WorkerStopped, when none of its processes is left."""

    must_end: ClassVar[bool] = True
    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class StartModel(ActionBase):
    """Start a server of a frozen model. Ends in ModelStarted or ModelFailed."""

    slot: SlotId
    incarnation: int
    model: str

    def failed(self, reason: str) -> e.ModelFailed:
        return e.ModelFailed(self.slot, self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class StopModel(ActionBase):
    """Stop a server of a frozen model once what it answers is answered, or has taken long enough;
    ``at_once``: nobody waits for the answers.

    Ends in ModelStopped, when none of its processes is left.
    """

    must_end: ClassVar[bool] = True
    slot: SlotId
    incarnation: int
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class AbortTurn(ActionBase):
    """End a generation now; its reply comes with what it has (finish reason ``abort``)."""

    request: int
    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Propose(ActionBase):
    """Ask the planner for a plan (``planner.answer``). Ends in PlanChosen or PlanKept."""

    why: str
    observation: Observation
    order: str = ""

    def failed(self, reason: str) -> e.PlanKept:
        """Return that the present plan is kept, with the planner's failure as the reason."""
        return e.PlanKept(f"the planner failed: {reason}", self.order)


@dataclass(frozen=True, slots=True)
class AnswerOrder(ActionBase):
    """Answer a user's order with whether it was accepted, and why."""

    order: str
    accepted: bool
    text: str


@dataclass(frozen=True, slots=True)
class Checkpoint(ActionBase):
    """Write a checkpoint of this step.

    Ends in CheckpointSaved, CheckpointFailed or TrainerFailed.
    """

    incarnation: int
    step: int
    ledger: dict[str, Any]

    def failed(self, reason: str) -> e.CheckpointFailed:
        return e.CheckpointFailed(self.incarnation, self.step, reason)


@dataclass(frozen=True, slots=True)
class StartEpisode(ActionBase):
    """Start an episode in its environment. Ends in EpisodeStarted, DemonstrationRead or
    EpisodeFailed.

    ``task`` is the task's place in the prompt stream; None: the group's number.
    """

    trajectory: TrajectoryId
    task: int | None = None

    def failed(self, reason: str) -> e.EpisodeFailed:
        return e.EpisodeFailed(self.trajectory, reason)


@dataclass(frozen=True, slots=True)
class Generate(ActionBase):
    """Generate a turn on a server. Ends in TurnGenerated or TurnFailed.

    Lower ``priority`` goes first in the server's queue.
    """

    request: int
    """A number never used twice in a run, so that a reply that
    comes twice or late is recognised.
    """
    trajectory: TrajectoryId
    slot: SlotId
    incarnation: int
    prompt_ids: array[int]
    max_tokens: Tokens
    cache_key: WeightVersion
    priority: int
    routes_from: Tokens = 0
    """The first token of the prompt of which it is not known which experts it was routed to."""
    kv_since: WeightVersion | None = None
    """The oldest version whose KV cache it may use; None: that of ``cache_key`` alone."""

    @property
    def kv_key(self) -> WeightVersion:
        """The name under which its KV is cached."""
        return kv_key(self.cache_key, self.kv_since)

    def failed(self, reason: str) -> e.TurnFailed:
        return e.TurnFailed(self.request, self.trajectory, self.slot, self.incarnation, reason)


@dataclass(frozen=True, slots=True)
class AdvanceEpisode(ActionBase):
    """Give the environment the generated turn. Ends in EpisodeAdvanced or EpisodeFailed."""

    trajectory: TrajectoryId
    token_ids: array[int]
    finish_reason: str
    logprobs: array[float]

    def failed(self, reason: str) -> e.EpisodeFailed:
        return e.EpisodeFailed(self.trajectory, reason)


@dataclass(frozen=True, slots=True)
class FinishEpisode(ActionBase):
    """A limit is reached: score what there is. Ends in EpisodeAdvanced (done) or EpisodeFailed."""

    trajectory: TrajectoryId

    def failed(self, reason: str) -> e.EpisodeFailed:
        return e.EpisodeFailed(self.trajectory, reason)


@dataclass(frozen=True, slots=True)
class AskTeacher(ActionBase):
    """Ask a teacher for the log-probability of each token, of each branch with generated ones. Ends
    in TeacherAnswered or TeacherFailed.
    """

    trajectory: TrajectoryId
    sequences: tuple[array[int], ...]

    def failed(self, reason: str) -> e.TeacherFailed:
        return e.TeacherFailed(self.trajectory, reason)


@dataclass(frozen=True, slots=True)
class ForgetEpisode(ActionBase):
    """The environment of this trajectory is no longer needed."""

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True)
class Wake(ActionBase):
    """Send ``TimerFired(name)`` after ``after_s`` seconds."""

    must_end: ClassVar[bool] = True
    name: str
    after_s: Seconds


@dataclass(frozen=True, slots=True)
class Save(ActionBase):
    record: Record


@dataclass(frozen=True, slots=True)
class End(ActionBase):
    """The run is over and nothing is left running. The last action of a machine."""

    state: str
    error: str


ServerAction: TypeAlias = (
    StartServer | CheckServer | StopServer | SyncServer | SleepServer | WakeServer
)
TurnAction: TypeAlias = Generate | AbortTurn
TrainerAction: TypeAlias = StartTrainer | StopTrainer | Train | Accumulate | Checkpoint
WorkerAction: TypeAlias = StartWorker | SyncWorker | StopWorker
ModelAction: TypeAlias = StartModel | StopModel
EpisodeAction: TypeAlias = StartEpisode | AdvanceEpisode | FinishEpisode | ForgetEpisode
RuntimeAction: TypeAlias = (
    ServerAction
    | TurnAction
    | TrainerAction
    | WorkerAction
    | ModelAction
    | EpisodeAction
    | AskTeacher
    | Propose
    | AnswerOrder
    | Wake
)
"""The actions that the runtime carries out; the driver itself does Save and End."""
Action: TypeAlias = RuntimeAction | Save | End
