"""What has happened outside, in the past tense. ``runtime`` makes them; ``machine.handle`` takes
them.

Events that answer an action about a slot carry the slot's ``incarnation`` at the time of the
action; the machine drops an answer of an old incarnation. The same holds for the trainer's
incarnation.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from libra_cli.core.evidence import Recalibration
from libra_cli.core.explanation import Explanation
from libra_cli.core.model_use import ModelUse
from libra_cli.core.types import (
    BranchPoint,
    ChosenExperts,
    LogRatios,
    LostGpu,
    Plan,
    Prediction,
    Role,
    Seconds,
    Slot,
    SlotId,
    Tokens,
    ToolReturn,
    TrajectoryId,
    VersionSpan,
    WeightVersion,
)


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A weight version of ``bytes`` bytes that can be fetched since ``at``."""

    version: WeightVersion
    bytes: int
    at: Seconds

    @property
    def name(self) -> str:
        """The name of the version's directory."""
        return self.version.name


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Hosts are connected, the model and the tokenizer are there."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The connection to a node dropped; its processes may well be alive."""

    node: str
    detail: str


@dataclass(frozen=True, slots=True)
class NodeBack:
    """A node that was lost, or given up, answers again; ``alive`` are our processes on it."""

    node: str
    alive: frozenset[str]


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A lost node is given up: its lease has run out, so what ran there is dead or about to be.

    NodeBack may still follow, from a new agent.
    """

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class ServerStarted:
    """The server is healthy and has generated a token (of no version we know)."""

    slot: SlotId
    incarnation: int
    engine: str = ""
    """What of its backend's engine runs, in words."""


@dataclass(frozen=True, slots=True)
class ServerFailed:
    """The server did not start, or its process ended, or it stopped answering."""

    slot: SlotId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ServerChecked:
    """A suspected server has answered its check."""

    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class ServerAsleep:
    """The server has given back its weights and KV cache; its process is kept."""

    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class ServerStopped:
    """No process of the server is left on the node, which lacks these GPUs where it had failed."""

    slot: SlotId
    incarnation: int
    lost: tuple[LostGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerSynced:
    """The server computes with ``published``, proved on the probe: ``gap`` is within tolerance."""

    slot: SlotId
    incarnation: int
    published: PublishedVersion
    gap: float
    pull_s: Seconds
    load_s: Seconds
    served_at: Seconds
    sent_bytes: int
    kind: str
    """How the version came to the host: ``full``, ``delta``, ``fabric`` or ``local``."""
    detail: str = ""
    """Why it did not come by a process group, if the recipe has them; empty otherwise."""


@dataclass(frozen=True, slots=True)
class SyncFailed:
    """The server has not got the version, or computes something else (``gap`` tells).

    ``answered`` is False when the connection broke, so that nobody knows.
    """

    slot: SlotId
    incarnation: int
    published: PublishedVersion
    reason: str
    answered: bool
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class TurnGenerated:
    """One generation ended. ``request`` and ``prompt_ids`` are those of the Generate action.

    ``spans`` count from the first generated token; ``newest`` is the newest version among them;
    ``cache_key`` is the version whose KV cache the request might reuse.
    """

    request: int
    trajectory: TrajectoryId
    slot: SlotId
    incarnation: int
    prompt_ids: array[int]
    token_ids: array[int]
    logprobs: array[float]
    spans: tuple[VersionSpan, ...]
    newest: WeightVersion
    cache_key: WeightVersion
    finish_reason: str
    started_at: Seconds
    routes: ChosenExperts | None = None


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """A generation did not come back. ``refused`` means the request itself was the problem, and
    ``unreachable`` that no answer came: the server, its host or the network was."""

    request: int
    trajectory: TrajectoryId
    slot: SlotId
    incarnation: int
    reason: str
    refused: bool = False
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeStarted:
    """The environment was reset; ``prompt_ids`` open the trajectory."""

    trajectory: TrajectoryId
    prompt_ids: array[int]
    environment: str = ""
    """The name of the environment, in a run that has several; else empty."""
    role: str = ""
    """The role of the environment that speaks first; empty if it has none."""
    turn_limit: Tokens | None = None
    """Tokens that the first turn may have by its agent's wish, within the recipe's limits."""
    waited_s: Seconds = 0.0
    """Seconds that the trajectory has waited for a place to be played at, until now."""


@dataclass(frozen=True, slots=True)
class PlacesCounted:
    """Hosts have told how many episodes they hold at once; None: as many as are wanted."""

    number: int | None


@dataclass(frozen=True, slots=True)
class DemonstrationRead:
    """A conversation to imitate is there, whole. ``loss_mask`` is 1 on the ``turns`` turns of the
    assistant, 0 on everything else.
    """

    trajectory: TrajectoryId
    token_ids: array[int]
    loss_mask: array[int]
    turns: int


@dataclass(frozen=True, slots=True)
class EpisodeAdvanced:
    """The environment answered a turn: with more tokens, or with the end and its reward.

    The tokens follow those of ``branch``; None: all that there are.
    """

    trajectory: TrajectoryId
    observation_ids: array[int]
    returns: tuple[ToolReturn, ...]
    done: bool
    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the environment reports of an episode that is done, by name."""
    branch: BranchPoint | None = None
    turn_reward: float = 0.0
    """The turn's own reward, of an episode that goes on; it is a part of the final reward."""
    role: str = ""
    """The role that speaks next, of an environment with roles, in an episode that goes on."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What roles that have spoken have earned since the event before, by role."""
    turn_limit: Tokens | None = None
    """Tokens that the next turn may have by its agent's wish, within the recipe's limits."""
    waited_s: Seconds = 0.0
    """Seconds that the trajectory has waited for a place to be played at, until now."""


@dataclass(frozen=True, slots=True)
class EpisodeFailed:
    """The environment broke (not: a tool answered with an error).

    One that only went with its controller does not count as a failure of the trajectory.
    """

    trajectory: TrajectoryId
    reason: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class TeacherAnswered:
    """The teacher's log-probabilities of every token of the sequences that it was asked about, in
    nats; 0 for the first of each, which nothing predicts."""

    trajectory: TrajectoryId
    logprobs: tuple[array[float], ...]


@dataclass(frozen=True, slots=True)
class TeacherFailed:
    """The teacher has given no log-probabilities.

    ``refused``: it answers, but not about these tokens.
    """

    trajectory: TrajectoryId
    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class TrainerStarted:
    """Every rank is there, the world has the asked size, and ``published`` can be fetched."""

    incarnation: int
    published: PublishedVersion


@dataclass(frozen=True, slots=True)
class TrainerFailed:
    """A rank ended, a step failed or the trainer stopped answering."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerStopped:
    """No process of the trainer is left on any node; they lack these GPUs where it had failed."""

    incarnation: int
    lost: tuple[LostGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class ShareDone:
    """The end of a worker's share of a step: added to the trainer's gradients, or the reason why
    not.

    ``seconds`` are the worker's own, None if it never reported; ``waited_s`` are the trainer's,
    after its own part; ``bytes`` were fetched in ``transfer_s``.
    """

    slot: SlotId
    incarnation: int
    used: bool
    reason: str
    tokens: Tokens
    seconds: Seconds | None
    waited_s: Seconds
    bytes: int
    transfer_s: Seconds


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """The advantages that a critic estimated for a trained trajectory, one a turn."""

    group: int
    member: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """An optimizer step is done.

    ``published`` is None if its version is still being written: VersionPublished follows.
    """

    incarnation: int
    step: int
    published: PublishedVersion | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    shares: tuple[ShareDone, ...] = ()
    log_ratios: LogRatios | None = None
    """The log-ratios of the trained tokens; None if the trainer does not report them."""
    advantages: tuple[TurnAdvantages, ...] = ()
    """The advantages that a critic in the trainer estimated; empty without a critic."""


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """The weights of a step that was done before can be fetched."""

    incarnation: int
    published: PublishedVersion


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The gradients of a part of a step's batch are in the trainer; nothing is updated yet."""

    incarnation: int
    step: int
    part: int


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The gradient worker's world is whole; it has no version that we know."""

    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerSynced:
    """The worker computes with ``published``: ``gap`` to the
    trainer, on the probe, is tolerable.
    """

    slot: SlotId
    incarnation: int
    published: PublishedVersion
    gap: float
    pull_s: Seconds
    load_s: Seconds
    loaded_at: Seconds


@dataclass(frozen=True, slots=True)
class WorkerSyncFailed:
    """The version did not reach the worker; nothing is said against the worker itself."""

    slot: SlotId
    incarnation: int
    published: PublishedVersion
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker did not start, its process ended, or it does not compute what the trainer does."""

    slot: SlotId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """No process of the worker is left on the node, which lacks these GPUs where it had failed."""

    slot: SlotId
    incarnation: int
    lost: tuple[LostGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelStarted:
    """The server of a frozen model answers requests."""

    slot: SlotId
    incarnation: int


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """The server of a frozen model did not start, its process ended, or it answers no more."""

    slot: SlotId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ModelStopped:
    """No process of the server is left on the node, which lacks these GPUs where it had failed."""

    slot: SlotId
    incarnation: int
    lost: tuple[LostGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelsUsed:
    """What was asked of each frozen model since the controller began."""

    uses: tuple[ModelUse, ...]


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The trainer wrote the checkpoint that was asked for, with a step or by itself."""

    incarnation: int
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """The checkpoint of ``step`` could not be written; the trainer itself works on."""

    incarnation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class ServerSampled:
    """One reading of a server's metrics."""

    slot: SlotId
    incarnation: int
    running: int
    waiting: int
    kv_use: float
    prefix_hit_rate: float | None
    preemptions: int
    generated_tokens: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Other metrics of the backend's page, by name."""


@dataclass(frozen=True, slots=True)
class PlanChosen:
    """Servers are to run where this plan has them; ``slots`` are all it knows, new ones too.

    A slot that shares GPUs with an old one is started when no process is left on these. ``order``
    names who asked for it; empty for the planner's own. ``recalibration`` are the factors that the
    decision multiplied its costs by; ``explanation`` is the planner's.
    """

    plan: Plan
    slots: tuple[Slot, ...]
    prediction: Prediction | None = None
    order: str = ""
    recalibration: Recalibration | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, slots=True)
class PlanKept:
    """The planner has looked, and today's plan stays."""

    why_not: str
    order: str = ""
    recalibration: Recalibration | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, slots=True)
class PlanOrdered:
    """A user wants another split, holds slots, or wants the planner to look now.

    ``to`` are numbers of slots by role; ``models`` numbers of servers by frozen model; ``pins``
    hold slots in a role (None lets go); ``shapes`` are joined slots that there are to be (True) or
    not to be any more (False). With none of these, the planner is asked.
    """

    order: str
    to: tuple[tuple[Role, int], ...] = ()
    pins: tuple[tuple[SlotId, Role | None], ...] = ()
    shapes: tuple[tuple[SlotId, bool], ...] = ()
    models: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time asked for with ``Wake`` has come."""

    name: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A user asks for the end of the run. ``at_once`` skips the checkpoint and the drain."""

    at_once: bool
    reason: str


RunEvent: TypeAlias = RunStarted | PlacesCounted | TimerFired | StopRequested
NodeEvent: TypeAlias = NodeLost | NodeBack | NodeGone
RolloutEvent: TypeAlias = (
    TurnGenerated
    | TurnFailed
    | EpisodeStarted
    | DemonstrationRead
    | EpisodeAdvanced
    | EpisodeFailed
    | TeacherAnswered
    | TeacherFailed
)
ServerEvent: TypeAlias = (
    ServerStarted
    | ServerFailed
    | ServerChecked
    | ServerAsleep
    | ServerStopped
    | ServerSynced
    | SyncFailed
    | ServerSampled
)
WorkerEvent: TypeAlias = (
    WorkerStarted | WorkerSynced | WorkerSyncFailed | WorkerFailed | WorkerStopped
)
ModelEvent: TypeAlias = ModelStarted | ModelFailed | ModelStopped | ModelsUsed
TrainerEvent: TypeAlias = (
    TrainerStarted
    | TrainerFailed
    | TrainerStopped
    | StepDone
    | VersionPublished
    | Accumulated
    | CheckpointSaved
    | CheckpointFailed
)
PlanEvent: TypeAlias = PlanChosen | PlanKept | PlanOrdered
Event: TypeAlias = (
    RunEvent
    | NodeEvent
    | RolloutEvent
    | ServerEvent
    | WorkerEvent
    | ModelEvent
    | TrainerEvent
    | PlanEvent
)
