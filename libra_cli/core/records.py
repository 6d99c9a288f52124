"""What a run remembers: one frozen dataclass a table, in the order a reader would want them.

The machine emits records inside ``Save`` actions; ``runtime.store`` derives the SQLite schema from
these classes and upserts by ``KEY``. A field is a column (but for ``NO_COLUMN``); its type is the
column's type. Times are seconds since the epoch. A column that holds JSON ends in ``_json``, and
the property without that ending is what it says.

These are the rows of ``libra_cli.api`` and of ``libra status --json`` too (``core.json_form``): a
field has one name everywhere. ``SHOWN`` are names beside it, such as those of an older libra.

Databases of older versions stay readable: a field that is added has a default, which older rows are
read with; a field that is renamed is entered in ``RENAMED``. See ``runtime.store.schema``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from json import dumps, loads
from math import isfinite
from typing import Any, ClassVar, Final, TypeAlias

from libra_cli.config.frozen_models import POOL
from libra_cli.core.explanation import Explanation
from libra_cli.core.json_form import HIDDEN, from_json_form
from libra_cli.core.types import BranchTokens, Role, ToolOutcome, ToolReturn

RENAMED: Final[Mapping[str, str]] = {
    "incarnation": "epoch",
    "trainer_incarnation": "trainer_epoch",
}
"""The name in databases of libra 0.1.0, by the column's name in whichever table."""
NO_COLUMN: Final[Mapping[str, bool]] = {"column": False, **HIDDEN}
"""Metadata of a field that is kept elsewhere than in a column."""


ENDING: Final = "the run is ending"
"""How ``RunRecord.waiting`` begins while a run is wound down."""


def to_metrics_json(metrics: Mapping[str, float | None]) -> str:
    """The text of a column ``metrics_json``. JSON knows no NaN and no infinity: they are null."""
    return dumps(
        {
            name: value if value is not None and isfinite(value) else None
            for name, value in metrics.items()
        }
    )


def from_metrics_json(text: str) -> dict[str, float | None]:
    """Return the metrics of a column ``metrics_json``, by name."""
    metrics: dict[str, float | None] = loads(text)
    return metrics


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The run itself; one row."""

    TABLE: ClassVar[str] = "runs"
    KEY: ClassVar[tuple[str, ...]] = ("id",)
    id: str
    recipe: str
    state: str
    """``starting | running | finished | failed | stopped``"""
    started_at: float
    ended_at: float | None
    target_steps: int
    step: int
    version: int
    waiting: str
    """A sentence on what waits for what."""
    error: str
    controller_pid: int
    controller_started: float
    """The pid's start time in clock ticks since boot, so that a recycled pid is never signalled."""

    @property
    def is_ending(self) -> bool:
        """Whether its controller winds it down: nothing new begins any more."""
        return self.waiting.startswith(ENDING)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One host of the recipe: whether it can be reached, and what was found on it."""

    TABLE: ClassVar[str] = "nodes"
    KEY: ClassVar[tuple[str, ...]] = ("node",)
    node: str
    host: str
    state: str
    """``connecting | ready | unreachable | failed | released``"""
    since: float
    facts_json: str = field(metadata=HIDDEN)
    detail: str

    @property
    def facts(self) -> dict[str, Any]:
        """``facts_json``, read: what was found on it; nothing before."""
        facts: dict[str, Any] = loads(self.facts_json or "{}")
        return facts


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process that was started on a host, as its agent last reported it."""

    TABLE: ClassVar[str] = "processes"
    KEY: ClassVar[tuple[str, ...]] = ("node", "process")
    node: str
    process: str
    """``agent``, ``model``, ``trainer-<rank>``, ``server-<index of slot>``, ``gradient-<index>``"""
    pid: int
    state: str
    """Either ``running`` or ``exited``."""
    since: float
    exit_code: int | None
    log: str
    """Path of the log file on the host."""


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One slot as it is now; ``SlotStateRecord`` keeps its earlier states."""

    TABLE: ClassVar[str] = "slots"
    KEY: ClassVar[tuple[str, ...]] = ("slot",)
    SHOWN: ClassVar[Mapping[str, str]] = {"idle": "idle", "epoch": "incarnation"}
    slot: str
    node: str
    gpus_json: str
    pool: str
    role: str
    state: str
    """A ``ReplicaState`` of ``core.cluster.replica``."""
    since: float
    incarnation: int
    bucket: str
    version: int | None
    verified: bool
    running: int
    """Requests of this run inside the server now."""
    waiting: int
    """Trajectories that the scheduler holds back for this bucket."""
    busy_s: float
    """Seconds, while serving, with at least one request running."""
    serving_s: float
    restarts: int
    detail: str
    engine: str = ""
    """Which model runner a server has, and whether it schedules ahead and has CUDA graphs."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """``gpus_json``, read: their indices on the host."""
        return tuple(loads(self.gpus_json or "[]"))

    @property
    def is_frozen(self) -> bool:
        """Whether it serves a model that is not the policy; ``bucket`` is its name."""
        return self.pool == POOL or self.role == Role.MODEL

    @property
    def idle(self) -> float | None:
        """The share of its serving time without a request; None if it has not served."""
        return max(0.0, 1 - self.busy_s / self.serving_s) if self.serving_s else None


@dataclass(frozen=True, slots=True)
class SlotStateRecord:
    """The state of a slot from ``since`` until the next row of the slot.

    ``runtime.store.journal`` writes one whenever a ``SlotRecord`` differs from the one before.
    """

    TABLE: ClassVar[str] = "slot_states"
    KEY: ClassVar[tuple[str, ...]] = ("slot", "since", "role", "state", "incarnation")
    slot: str
    since: float
    role: str
    state: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One reading of a server's counters."""

    TABLE: ClassVar[str] = "samples"
    KEY: ClassVar[tuple[str, ...]] = ("slot", "at")
    slot: str
    at: float
    running: int
    waiting: int
    kv_use: float
    prefix_hit_rate: float | None
    preemptions: int
    occupancy: float
    """Mean share of the server's seats that were taken since the
    reading before, by the run's own count.
    """
    generated_tokens: int
    """Tokens generated since the server started, by its own counter."""
    tokens_per_s: float
    metrics_json: str = "{}"
    """Name -> number or null: all else that the rollout backend names."""

    @property
    def metrics(self) -> dict[str, float | None]:
        return from_metrics_json(self.metrics_json)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The trajectories of one prompt, and the step that trained on them."""

    TABLE: ClassVar[str] = "groups"
    KEY: ClassVar[tuple[str, ...]] = ("group_id",)
    group_id: int
    state: str
    """``open | ready | claimed | trained | dropped | filtered | stale``"""
    started_at: float
    ended_at: float | None
    started_version: int
    step: int | None
    reward: float | None
    """Mean reward of the members; None until all have ended."""
    detail: str
    task: int | None = None
    """The task of the stream that the group plays, where a curriculum has chosen it."""


@dataclass(frozen=True, slots=True)
class LateRecord:
    """A trajectory that was unfinished when its group was closed, and is trained after it."""

    TABLE: ClassVar[str] = "late"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "member")
    group_id: int
    member: int
    step: int | None
    """The step that trained it; that of the group trained the others. None until then."""


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """One attempt at one trajectory; an attempt that fails is followed by another."""

    TABLE: ClassVar[str] = "trajectories"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "member", "attempt")
    group_id: int
    member: int
    attempt: int
    state: str
    """``running | finished | failed | dropped``"""
    started_at: float
    ended_at: float | None
    reward: float | None
    turns: int
    generated_tokens: int
    context_tokens: int
    """Tokens of all its branches, prompts and tool returns included."""
    min_version: int | None
    max_version: int | None
    spans_json: str
    """``[[version, start, end], ...]``"""
    detail: str
    branches_json: str = "[]"
    """``[[number, spans], ...]`` of the branches beside the last."""
    environment: str = ""
    """The name of its environment, in a run that has several."""
    metrics_json: str = "{}"
    """Name -> number: the metrics that its environment reported."""
    tokens_at: int | None = None
    """Offset of its tokens in ``tokens.bin``; None if it has not ended."""
    tokens: tuple[BranchTokens, ...] = field(
        default=(), repr=False, compare=False, kw_only=True, metadata=NO_COLUMN
    )
    """The tokens of each branch on their way to the file, the branch it ended in last."""
    truncated: bool = False
    """Whether a limit of turns or tokens cut it (``core.sampling.overlong``)."""
    roles_json: str = "[]"
    """The role of each branch, in the order of ``tokens``; empty if its environment has none."""
    environment_s: float | None = None
    """Seconds that its environment, or its agent, had it; None if it has not ended."""
    waited_s: float | None = None
    """Seconds of ``environment_s`` that it waited for a place to be played at."""

    @property
    def metrics(self) -> dict[str, float | None]:
        return from_metrics_json(self.metrics_json)


@dataclass(frozen=True, slots=True)
class CreditRecord:
    """The advantages and log-ratios of a trajectory in the step that trained it."""

    TABLE: ClassVar[str] = "credits"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "member", "attempt")
    group_id: int
    member: int
    attempt: int
    step: int
    advantages_json: str
    """``[[[token, advantage], ...], ...]``: of each branch, in the order of
    ``TrajectoryRecord.token_ids``, from which token on it is which; 0 before the first."""
    turns_json: str
    """``[[branch, start, end, reward], ...]``: of each turn its place among these branches, its
    tokens and what it earned."""
    log_ratios_at: int | None = None
    """Offset of the log-ratios of its tokens in ``tokens.bin``; None if there are none."""
    log_ratios: tuple[bytes, ...] = field(
        default=(), repr=False, compare=False, kw_only=True, metadata=NO_COLUMN
    )
    """The log-ratios of each branch on their way to the file, as ``LogRatios.by_branch`` has them;
    empty for a branch without.
    """


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One generation of a trajectory, where it was played, and the tool calls after it."""

    TABLE: ClassVar[str] = "turns"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "member", "attempt", "turn")
    SHOWN: ClassVar[Mapping[str, str]] = {"group": "group_id"}
    group_id: int
    member: int
    attempt: int
    turn: int
    """Place of the turn in its trajectory, from 0."""
    slot: str
    """Where its server was."""
    incarnation: int
    """Which of the servers that have started there, from 1."""
    queued_at: float
    started_at: float
    """When a server took it."""
    ended_at: float
    """When it was generated; its tools ran after it."""
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    """``stop``, or ``length`` if a limit cut it."""
    moved_from: str
    """The server of the turn before, if it was another one."""
    tools_json: str
    """``[[tool, outcome, latency_s, characters], ...]``"""

    @property
    def group(self) -> int:
        """``group_id``, as ``libra_cli.api`` calls it too."""
        return self.group_id

    @property
    def tools(self) -> tuple[ToolReturn, ...]:
        """``tools_json``, read: the tool calls, in order."""
        calls = loads(self.tools_json or "[]")
        return tuple(ToolReturn(tool, ToolOutcome(how), *rest) for tool, how, *rest in calls)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step; the step log."""

    TABLE: ClassVar[str] = "steps"
    KEY: ClassVar[tuple[str, ...]] = ("step",)
    step: int
    started_at: float
    ended_at: float
    waited_s: float
    """Seconds the trainer stood idle before this step, and between its parts where it streams."""
    reward: float
    logprob_gap: float | None
    """Mean |rollout - trainer| log-probability over the tokens of this batch that were generated
    with the very version the trainer held when it computed theirs; None if there was none."""
    logprob_gap_tokens: int
    generated_tokens: int
    context_tokens: int
    mean_length: float
    """Mean generated tokens of a trajectory."""
    p99_length: float
    staleness_mean: float
    staleness_max: int
    tokens_per_s: float
    """Generated tokens of this batch over ``period_s``."""
    trainer_s: float
    checkpoint: str
    """Path of the checkpoint written after this step, or empty."""
    metrics_json: str = "{}"
    """Name -> number or null: the loss, and all else that the trainer and the loss name."""
    batch_json: str = "{}"
    """Name -> number or null: what ``core.rollout.batches`` says of the batch."""
    groups_json: str = "[]"
    """The groups that were trained: ``group`` of one with all its
    members, else ``[group, [member, ...]]``.
    """
    replayed_json: str = "[]"
    """The groups that were trained again, out of the replay buffer."""
    held_s: float = 0.0
    """Seconds of ``waited_s`` in which a full batch was ready, and the staleness rule waited for
    groups that this step is the last one for."""
    between_parts_s: float = 0.0
    """Seconds of ``waited_s`` that lie between ``started_at`` and ``ended_at``: those in which a
    streamed step (``training.stream``) waited for its next part."""

    @property
    def metrics(self) -> dict[str, float | None]:
        return from_metrics_json(self.metrics_json)

    @property
    def batch(self) -> dict[str, float | None]:
        return from_metrics_json(self.batch_json)

    @property
    def compile_s(self) -> float:
        """Seconds of the step in which layers were compiled (``training.compile``): the first steps
        have some, and are no measure of what a step takes."""
        return self.metrics.get("compile_s") or 0.0

    @property
    def free_at(self) -> float:
        """When the step before ended, or the trainer was free, in seconds since the epoch."""
        return self.started_at - (self.waited_s - self.between_parts_s)

    @property
    def train_s(self) -> float:
        """Seconds that the step was in the trainer, without the waits for parts of it."""
        return self.ended_at - self.started_at - self.between_parts_s

    @property
    def train_share(self) -> float:
        """The share of the time from ``started_at`` to ``ended_at`` that is ``train_s``. When in
        that time a streamed step waited is in no row."""
        return self.train_s / max(self.ended_at - self.started_at, 1e-9)

    @property
    def period_s(self) -> float:
        """Seconds from the end of the step before, or when the trainer was free, to its end:
        ``waited_s`` and ``train_s``."""
        return self.waited_s + self.ended_at - self.started_at - self.between_parts_s


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One weight version that a trainer has published."""

    TABLE: ClassVar[str] = "versions"
    KEY: ClassVar[tuple[str, ...]] = ("version", "trainer_incarnation")
    version: int
    trainer_incarnation: int
    published_at: float
    bytes: int


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """One server loading one version."""

    TABLE: ClassVar[str] = "syncs"
    KEY: ClassVar[tuple[str, ...]] = ("slot", "incarnation", "version", "trainer_incarnation")
    slot: str
    incarnation: int
    version: int
    trainer_incarnation: int
    published_at: float
    served_at: float
    """When the server served again, with the version."""
    verified_at: float
    pull_s: float
    load_s: float
    bytes: int
    """Bytes of the whole version."""
    sent_bytes: int
    """Bytes sent to the host for it: 0 where the version was on the host already."""
    kind: str
    """``full | delta | fabric | local``; empty if the sync failed."""
    gap: float | None
    """Mean absolute difference of the probe's log-probabilities; None if it was not measured."""
    verified: bool
    detail: str
    """Why it is not verified, or did not come over the fabric of the recipe; empty otherwise."""

    @property
    def problem(self) -> str:
        """A sentence on why the server does not serve the version; empty if it does."""
        if self.verified:
            return ""
        what = "was not loaded" if self.gap is None else "does not verify"
        return f"slot {self.slot}: version {self.version} {what}: {self.detail}"


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """One server of a plan: its slot and its shape."""

    slot: str
    bucket: str
    tensor_parallel: int
    max_num_seqs: int
    up_to_tokens: int


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """One plan that was adopted: the role of every slot, why, and what it gained."""

    TABLE: ClassVar[str] = "plans"
    KEY: ClassVar[tuple[str, ...]] = ("plan",)
    SHOWN: ClassVar[Mapping[str, str]] = {
        "predicted_gain": "predicted_gain",
        "observed_gain": "observed_gain",
    }
    plan: int
    at: float
    servers_json: str
    """``[[slot, bucket, tensor_parallel, max_num_seqs, up_to_tokens], ...]``"""
    train_json: str
    """The slots of the trainer, in rank order."""
    reasons_json: str
    gradient_json: str = "[]"
    """The slots of gradient workers, as a list."""
    cause: str = "start"
    """``start | planner | order``"""
    predicted_before_s: float | None = None
    """Seconds a step would go on to take under the plan before, as predicted when it was chosen."""
    predicted_after_s: float | None = None
    cost_s: float | None = None
    """Predicted cost of its moves, in seconds of the whole job."""
    observed_before_s: float | None = None
    """Mean seconds of the last steps before the plan was chosen."""
    observed_after_s: float | None = None
    """Mean seconds of the first steps after the last move of the plan; None until they are done."""
    models_json: str = "[]"
    """``[[slot, model], ...]``: the slots that serve frozen models."""

    @property
    def servers(self) -> tuple[PlannedServer, ...]:
        return tuple(PlannedServer(*row) for row in loads(self.servers_json or "[]"))

    @property
    def train(self) -> tuple[str, ...]:
        return tuple(loads(self.train_json or "[]"))

    @property
    def gradient(self) -> tuple[str, ...]:
        return tuple(loads(self.gradient_json or "[]"))

    @property
    def models(self) -> tuple[tuple[str, str], ...]:
        return tuple((slot, model) for slot, model in loads(self.models_json or "[]"))

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(loads(self.reasons_json or "[]"))

    @property
    def predicted_gain(self) -> float | None:
        """1 - seconds a step after / before, as predicted; below 0 the steps are longer."""
        return _gain(self.predicted_before_s, self.predicted_after_s)

    @property
    def observed_gain(self) -> float | None:
        """1 - seconds a step after / before, as observed around its moves."""
        return _gain(self.observed_before_s, self.observed_after_s)


def _gain(before_s: float | None, after_s: float | None) -> float | None:
    if before_s is None or after_s is None or before_s <= 0:
        return None
    gain = 1 - after_s / before_s
    return gain if isfinite(gain) else None


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase of a move; ``began`` and ``ended`` are older names of its two times."""

    SHOWN: ClassVar[Mapping[str, str]] = {"began": "started_at", "ended": "ended_at"}
    phase: str
    started_at: float
    ended_at: float | None = None
    """None in the phase that is under way."""

    @property
    def began(self) -> float:
        return self.started_at

    @property
    def ended(self) -> float | None:
        return self.ended_at


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """One slot changing its role, phase by phase."""

    TABLE: ClassVar[str] = "moves"
    KEY: ClassVar[tuple[str, ...]] = ("move",)
    move: int
    plan: int
    """The number of the plan that asked for the move."""
    slot: str
    from_role: str
    to_role: str
    state: str
    """A phase of ``core.reconcile.migration`` while it is under way, then ``done | failed``."""
    started_at: float
    ended_at: float | None
    phases_json: str
    """``[[phase, started_at, ended_at], ...]``; the last is null in the phase under way."""
    detail: str
    """The reason why the move failed, and where that left the slot."""

    @property
    def phases(self) -> tuple[PhaseRow, ...]:
        return tuple(PhaseRow(*row) for row in loads(self.phases_json or "[]"))


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One call of the planner, and its decision."""

    TABLE: ClassVar[str] = "decisions"
    KEY: ClassVar[tuple[str, ...]] = ("at",)
    at: float
    step: int
    why: str
    """The reason why the planner was called."""
    plan: int | None
    """The number of the plan that was adopted; None to stay."""
    why_not: str
    rollout_factor: float
    """Factor on the costs of rollout that makes them agree with
    measured steps; ``training_factor`` likewise.
    """
    training_factor: float
    explanation_json: str = "{}"
    """The decision explained, a ``core.explanation.Explanation``; empty where the planner could not
    decide, or its choice was not carried out.
    """
    observed_s: float | None = None
    """Mean seconds of the first steps after it and after the last of
    its moves; None until they are done.
    """
    observed_steps: int = 0
    """Steps of that mean: fewer than planned where the next decision came first."""
    bound: int | None = None
    """The staleness bound from here on, in versions; None where the recipe fixes it."""

    @property
    def explanation(self) -> Explanation | None:
        """``explanation_json``, read; None where there is none."""
        told = loads(self.explanation_json)
        return from_json_form(Explanation, told) if told else None


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation: the trajectories played, and the estimates from their rewards."""

    TABLE: ClassVar[str] = "evaluations"
    KEY: ClassVar[tuple[str, ...]] = ("evaluation",)
    evaluation: int
    """The number of the evaluation in the run, from 0."""
    name: str
    step: int
    """Step of the weight version at which it began;
    ``trainer_incarnation`` is of that version too.
    """
    trainer_incarnation: int
    state: str
    """``running | finished | cut``"""
    started_at: float
    ended_at: float | None
    tasks: int
    samples: int
    """Trajectories of each task."""
    finished: int
    """Trajectories that have ended."""
    failed: int
    """Trajectories whose environment broke every time, or that servers died of."""
    version_mean: float | None
    """Mean step of the weights that generated its tokens."""
    generated_tokens: int
    metrics_json: str = "{}"
    """Name -> number: ``pass@1``, ``pass@1/low`` and so on, of what had ended when it was estimated
    last (``core.evaluation.estimates``), the mean ``length`` in generated tokens and ``turns``."""

    @property
    def metrics(self) -> dict[str, float]:
        """``metrics_json``, read; what is not known is left out."""
        named = from_metrics_json(self.metrics_json)
        return {name: value for name, value in named.items() if value is not None}

    @property
    def score(self) -> float | None:
        """The mean reward, by which the best checkpoint is known; None until it has finished."""
        return self.metrics.get(f"avg@{self.samples}") if self.state == "finished" else None


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """One checkpoint exported as a Hugging Face directory."""

    TABLE: ClassVar[str] = "exports"
    KEY: ClassVar[tuple[str, ...]] = ("path", "node")
    step: int
    node: str
    path: str
    """The directory, on the node."""
    at: float
    bytes: int
    seconds: float
    """Seconds that the export took."""
    score: float | None
    """The checkpoint's score, by which the best one is known."""


@dataclass(frozen=True, slots=True)
class FrozenModelRecord:
    """The files of a frozen model on a host that serves it, as they were read there last."""

    TABLE: ClassVar[str] = "frozen_models"
    KEY: ClassVar[tuple[str, ...]] = ("model", "node")
    model: str
    node: str
    path: str
    """The directory of them that the recipe names."""
    digest: str
    """SHA-256 of what ``sha256sum`` prints of them in the order of their names; the same on all
    hosts, or they do not serve."""
    bytes: int
    at: float
    seconds: float
    """Seconds that reading them took; few where nothing had changed since."""
    files_json: str = field(metadata=HIDDEN)

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """``files_json``, read: bytes and SHA-256 of each file, by its name."""
        return {name: (size, told) for name, (size, told) in loads(self.files_json).items()}


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """A note on something that a person must know, of a run that goes on all the same."""

    TABLE: ClassVar[str] = "notes"
    KEY: ClassVar[tuple[str, ...]] = ("kind", "subject")
    kind: str
    """The kind of thing that the note is about, such as ``checkpoint``."""
    subject: str
    """The thing that the note is about; a later note on it takes the place of an earlier one."""
    at: float
    text: str
    """Sentences: what happened, what follows from it, and what can be done."""
    resolved_at: float | None = None
    """When the matter was resolved; None while it is not."""


@dataclass(frozen=True, slots=True)
class RegretRecord:
    """What a run lost to the best plan that stays, in hindsight: simulated on its own trajectories
    and prices when it ended."""

    TABLE: ClassVar[str] = "regrets"
    KEY: ClassVar[tuple[str, ...]] = ("against",)
    against: str
    """``static``: the best of the plans that stay from the first step to the last."""
    at: float
    text: str
    """The certificate in a sentence, or why there is none."""
    regret: float | None = None
    """1 - seconds under that plan / seconds as it was, both simulated; None if it is not known."""
    ci95: float | None = None
    """Half of the 95 % interval of ``regret``, with the simulator's own error; None of a single
    simulation by an older libra."""
    plan: str = ""
    """The best plan, as ``rollout=2, train=1``."""
    plans: int = 0
    """Plans that stay which were simulated."""
    steps: int = 0
    """Steps that were simulated, evenly over the run; by an older libra its last ones."""
    seeds: int = 0
    """Resamplings of its groups that were simulated, the run's own order among them."""
    error: float | None = None
    """Simulated over measured seconds of the run as it was, less 1: + is simulated too slow."""
    seconds: float = 0.0
    """Seconds that finding out took."""


Record: TypeAlias = (
    RunRecord
    | NodeRecord
    | ProcessRecord
    | SlotRecord
    | SlotStateRecord
    | SampleRecord
    | GroupRecord
    | LateRecord
    | TrajectoryRecord
    | CreditRecord
    | TurnRecord
    | StepRecord
    | VersionRecord
    | SyncRecord
    | PlanRecord
    | MoveRecord
    | DecisionRecord
    | EvaluationRecord
    | ExportRecord
    | FrozenModelRecord
    | NoteRecord
    | RegretRecord
)
