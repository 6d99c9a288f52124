"""The values the core speaks in. Every name here is a word of the design page."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import NamedTuple, TypeAlias

Seconds: TypeAlias = float
Tokens: TypeAlias = int
Version: TypeAlias = int
"""The optimizer steps behind some weights; ``WeightVersion`` says of which trainer."""
SlotId: TypeAlias = str
"""``<node>/<index>``, for example ``gpu-01/0``; ``node_of`` gives the node. Slots that are
joined are one, with their indices: ``gpu-01/0+1``."""
GroupId: TypeAlias = int
"""The position of the group's prompt in the run's prompt stream, or one of an evaluation's tasks
(``is_evaluation``); never reused."""
EVALUATION_GROUPS: GroupId = 1 << 52
"""The first id of a task of an evaluation: JSON's numbers hold all up to twice that exactly."""


def is_evaluation(group: GroupId) -> bool:
    """Whether the group is a task of an evaluation, whose trajectories are never trained on."""
    return group >= EVALUATION_GROUPS


def node_of(slot: SlotId) -> str:
    """The name of the node that a slot is on."""
    return slot.rpartition("/")[0]


@cache
def parts_of(slot: SlotId) -> tuple[int, ...]:
    """Return the indices of its node's equal parts that a slot
    has; none if its name does not tell.
    """
    indices = slot.rpartition("/")[2].split("+")
    return tuple(map(int, indices)) if all(index.isdecimal() for index in indices) else ()


class Pool(StrEnum):
    """The sides that a slot may be used for."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    HYBRID = "hybrid"


class Role(StrEnum):
    """The side that a slot is used for now."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    GRADIENT = "gradient"
    MODEL = "model"
    IDLE = "idle"
    FAILED = "failed"


class ToolOutcome(StrEnum):
    """The outcome of a tool call."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


INVALID = "invalid"
"""The tool's name of a call that could not be read as one of any tool."""


class TrajectoryId(NamedTuple):
    """One member of one group. ``attempt`` counts restarts from scratch, from 0."""

    group: GroupId
    member: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.group}.{self.member}.{self.attempt}"


class WeightVersion(NamedTuple):
    """The weights after ``step`` optimizer steps of trainer number ``trainer_incarnation``.

    Ordered: those of a restarted trainer are newer, whatever their step.
    """

    trainer_incarnation: int
    step: Version

    @property
    def name(self) -> str:
        """The name of its directory on every host, as the trainer spells it: ``v000007-e1``."""
        return f"v{self.step:06d}-e{self.trainer_incarnation}"

    @property
    def label(self) -> str:
        """The version's name in servers' replies and the salt of their prefix caches: ``e1v7``."""
        return f"e{self.trainer_incarnation}v{self.step}"


def kv_key(served: WeightVersion, since: WeightVersion | None) -> WeightVersion:
    """Return the version under whose name KV is cached for one who may use KV of versions from
    ``since`` on, at a server of weights ``served``; None: of these alone.

    What is cached under a name is of this version or of newer ones.
    """
    return served if since is None else min(served, since)


STARTED_WITH = WeightVersion(0, 0)
"""The weights of the directory that a server was started with.

No run has it: trainers are counted from 1.
"""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a trajectory were generated with weight ``version``: its step."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ToolReturn:
    """The return of one tool call: ``characters`` is the length of its payload."""

    tool: str
    outcome: ToolOutcome
    latency_s: Seconds
    characters: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A set of GPUs of one node, or on a host without any, where they are empty, of its cores."""

    id: SlotId
    node: str
    gpus: tuple[int, ...]
    pool: Pool

    @property
    def parts(self) -> tuple[int, ...]:
        """Indices of the node's equal parts that the slot has."""
        return parts_of(self.id)

    @property
    def is_joined(self) -> bool:
        """Whether the slot joins several of its node's parts."""
        return len(self.parts) > 1

    @property
    def num_devices(self) -> int:
        """GPUs of the slot; on a host without any, where the CPU is the device, its parts."""
        return len(self.gpus) or len(self.parts) or 1

    def overlaps(self, other: Slot) -> bool:
        """Whether a process on the one takes something from a process on the other."""
        return not devices_of(self).isdisjoint(devices_of(other))


@cache
def devices_of(slot: Slot) -> frozenset[tuple[str, int | str]]:
    """Return the devices that only one process may have: parts of the node, else GPUs, else the
    slot.

    Of two slots of one node both are named after parts or neither. Parts may share a GPU.
    """
    return frozenset((slot.node, device) for device in slot.parts or slot.gpus or (slot.id,))


@dataclass(frozen=True, slots=True)
class LostGpu:
    """A GPU that its host does not have any more: it fell off the bus, or must be reset."""

    node: str
    number: int
    """The number that slots know it by."""
    name: str
    """The UUID of that GPU."""

    def __str__(self) -> str:
        return f"GPU {self.number} of {self.node} ({self.name})"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Servers of one shape. ``up_to_tokens`` is the longest remainder it is meant for."""

    name: str
    tensor_parallel: int
    max_num_seqs: int
    up_to_tokens: Tokens

    def has_shape_of(self, other: Bucket) -> bool:
        """Whether a server of the one is a server of the other; they may be meant for others."""
        mine = (self.tensor_parallel, self.max_num_seqs)
        return mine == (other.tensor_parallel, other.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Plan:
    """An assignment of slots to roles, and the shape of every server.

    ``servers`` maps each rollout slot to its bucket; ``train`` are the slots of the core, in rank
    order; ``gradient`` are those of gradient workers; ``models`` maps slots that serve a frozen
    model to its name. ``reasons`` are sentences for people.
    """

    servers: tuple[tuple[SlotId, Bucket], ...]
    train: tuple[SlotId, ...]
    reasons: tuple[str, ...] = ()
    gradient: tuple[SlotId, ...] = ()
    models: tuple[tuple[SlotId, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of a step before and after a plan, and the cost of its moves in seconds."""

    before_s: Seconds
    after_s: Seconds
    cost_s: Seconds


class TurnReward(NamedTuple):
    """The reward of a turn, and its tokens ``[start, end)`` in a branch."""

    branch: int
    start: Tokens
    end: Tokens
    reward: float = 0.0
    anchor: int = 0
    """A digest of what the model was shown before the turn: the prompt, or the last observation."""
    role: str = ""
    """The role of the environment that took the turn; empty if it has none."""


class Outcome(NamedTuple):
    """The rewards and lengths of an ended trajectory, from which alone advantages are estimated."""

    reward: float
    """Reward of the episode: the sum of those of its turns; with roles the mean over the roles."""
    generated: Tokens = 0
    turns: tuple[TurnReward, ...] = ()


class BranchPoint(NamedTuple):
    """The point where a trajectory's context goes on: after the first ``kept`` tokens of a branch.

    If ``kept`` is all of the branch, that goes on itself; else a new branch begins with these
    tokens. Branches are numbered from 0 in the order in which they begin.
    """

    branch: int
    kept: Tokens


class ChosenExperts(NamedTuple):
    """The experts that a server's routers chose for neighbouring tokens of a context."""

    start: Tokens
    """Index in the context of the first of these tokens."""
    layers: int
    """Layers of the model, those without experts too: there all are 0."""
    chosen: int
    """Experts of a token in a layer."""
    ids: array[int]
    """``layers`` times ``chosen`` a token; typecode ``B`` up to 256 experts in a layer, else ``H``.
    """

    @property
    def end(self) -> Tokens:
        """Index in the context of the token after the last."""
        return self.start + len(self.ids) // (self.layers * self.chosen)

    def first(self, tokens: Tokens) -> ChosenExperts:
        """A copy of those of the first tokens of the context."""
        kept = max(0, tokens - self.start) * self.layers * self.chosen
        return self._replace(ids=self.ids[:kept])

    def extend(self, later: ChosenExperts) -> None:
        """Add what ``later`` has of the tokens after these; nothing if tokens lie between."""
        same = (later.layers, later.chosen, later.ids.typecode)
        if later.start <= self.end and same == (self.layers, self.chosen, self.ids.typecode):
            known = (self.end - later.start) * self.layers * self.chosen
            self.ids.extend(later.ids[known:])


@dataclass(slots=True, kw_only=True)
class Branch:
    """One sequence of tokens of a trajectory.

    ``token_ids``, ``logprobs`` and ``loss_mask`` have one entry a token; tokens that it does not
    train on (of prompts and tools, and those that it began with, which another branch trains on)
    have log-probability 0 and mask 0. ``spans`` cover exactly the others, in order.
    ``single_version`` is the version that produced each of these, from a KV cache of its own, so
    that log-probabilities can be compared with the trainer's; None when mixed. ``teacher`` has the
    teacher's log-probabilities, where the mask is 1, once a trajectory of a run with a teacher has
    ended.
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    loss_mask: array[int] = field(default_factory=lambda: array("b"))
    spans: list[VersionSpan] = field(default_factory=list)
    single_version: WeightVersion | None = None
    teacher: array[float] = field(default_factory=lambda: array("f"))
    routes: ChosenExperts | None = None
    """The experts chosen for its first tokens, where training follows them; else None."""
    role: str = ""
    """The role of the environment whose conversation it is; empty if it has none."""

    def behind(self, held: Version) -> Iterator[tuple[int, int, int]]:
        """Return (versions behind ``held``, start, end) for the generated tokens ``[start, end)``.

        After a rollback a token may come from a version yet to be trained again: that is 0.
        """
        return ((max(0, held - span.version), span.start, span.end) for span in self.spans)


@dataclass(frozen=True, slots=True)
class BranchTokens:
    """A branch of a trajectory that has ended, as it is kept; see ``Branch``."""

    number: int
    """Index of the branch, in the order in which they began."""
    token_ids: array[int]
    loss_mask: array[int]
    """1 where the policy generated the token in this branch."""
    logprobs: array[float]
    """Log-probabilities as sampled, in nats, 0 where the mask is;
    empty where an older libra kept none.
    """
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class LogRatios:
    """Log-ratios of the tokens that a step trained: the log-probability that the trainer's model
    gave each before its first update, less that of the rollout policy, in nats.
    """

    branches: array[int]
    """Typecode ``q``, four for each branch: group, member, number, how many of ``values``."""
    values: array[int]
    """Typecode ``H``, one for each generated token: the bits of a float16; NaN for a token that was
    left out of the loss."""

    def by_branch(self) -> dict[tuple[int, int, int], bytes]:
        """Return the float16 values of each branch, little-endian,
        by group, member and branch number.
        """
        found, start, of = {}, 0, self.branches
        for at in range(0, len(of), 4):
            end = start + of[at + 3]
            found[of[at], of[at + 1], of[at + 2]] = self.values[start:end].tobytes()
            start = end
        return found


@dataclass(slots=True)
class Trajectory(Branch):
    """One multi-turn episode as tokens: its own are those of the branch that goes on.

    Most have one branch. An agent that leaves its conversation, for one that has only its first
    part or nothing of it, makes more. Each generated token is in the mask of one branch.
    """

    id: TrajectoryId
    min_version: Version | None = None
    """The oldest version that produced a token, or None before the first."""
    turns: int = 0
    generated: Tokens = 0
    """Tokens the policy produced, in all branches."""
    tools: int = 0
    """Tool calls that have returned."""
    unreadable: int = 0
    """Tool calls that could not be read as a call of a tool there is."""
    reward: float | None = None
    started_at: Seconds = 0.0
    environment_s: Seconds = 0.0
    """Seconds that its environment, or its agent, has had it, waiting for a place included."""
    waited_s: Seconds = 0.0
    """Seconds of these that it waited for a place: for a call, a process or an agent to begin."""
    environment: str = ""
    """The name of its environment, in a run that has several."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that its environment reported, by name."""
    truncated: bool = False
    """Whether a limit cut its last turn, or ended it (``core.sampling.overlong``)."""
    number: int = 0
    """The number of the branch that goes on."""
    others: dict[int, Branch] = field(default_factory=dict)
    """The other branches, by number."""
    turn_rewards: list[TurnReward] = field(default_factory=list)
    """The reward of each turn that its environment has answered, in order."""

    def add_span(self, span: VersionSpan) -> None:
        self.spans.append(span)
        if self.min_version is None or span.version < self.min_version:
            self.min_version = span.version

    @property
    def outcome(self) -> Outcome:
        """The outcome so far; a trajectory without a reward counts as 0."""
        return Outcome(self.reward or 0.0, self.generated, tuple(self.turn_rewards))

    @property
    def branches(self) -> list[Branch]:
        """All branches of the trajectory, by number."""
        numbered = {**self.others, self.number: self}
        return [numbered[number] for number in sorted(numbered)] if self.others else [self]

    @property
    def all_tokens(self) -> Tokens:
        """Tokens of all branches, which is what training on it passes over."""
        return sum([len(branch.token_ids) for branch in self.branches])

    @property
    def max_version(self) -> Version | None:
        """The newest version that produced a token, or None before the first."""
        versions = [span.version for branch in self.branches for span in branch.spans]
        return max(versions, default=None)
