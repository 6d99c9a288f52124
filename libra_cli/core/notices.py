"""What one part of the machine has to tell another, as values.

A part that has done something which concerns a part beside it says so among its results; the
machine hands each notice on at once, and what comes of it takes its place among the actions (as
dask's worker state machine does with its recommendations).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from libra_cli.core.actions import Action, Train
from libra_cli.core.events import PublishedVersion, ShareDone
from libra_cli.core.records import StepRecord
from libra_cli.core.types import GroupId, Seconds, SlotId

if TYPE_CHECKING:
    from libra_cli.core.cluster.replica import Replica
    from libra_cli.core.rollout.groups import Group


class NoticeBase:
    """The base of all notices, by which the machine tells them from actions."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ReplicaChanged(NoticeBase):
    """A replica has another state, role, shape or version, or its counters were read."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class RoutingChanged(NoticeBase):
    """Other servers than before may be sent requests, though none has changed its state."""


@dataclass(frozen=True, slots=True)
class ProcessGone(NoticeBase):
    """No process of the replica is left; the reconciler decides whether another is started."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class ServerProved(NoticeBase):
    """The server has proved a version: replies that waited for that count now."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class ServerLost(NoticeBase):
    """The server has been taken out: what was generating there is to be queued again.

    ``died``: it ended, or stopped answering, with that inside.
    """

    slot: SlotId
    died: bool


@dataclass(frozen=True, slots=True)
class ServerAnswered(NoticeBase):
    """The server has answered a check: what broke off there was not its end."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class TurnsBroken(NoticeBase):
    """The turns on the server are broken off, and go on elsewhere from the tokens they have."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class RequestSent(NoticeBase):
    """A request was sent to the server of this slot."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class RequestEnded(NoticeBase):
    """A request on the server of this slot ended; ``answered`` with a reply that counts."""

    slot: SlotId
    answered: bool


@dataclass(frozen=True, slots=True)
class RequestBroke(NoticeBase):
    """A request to the server did not come back; the server, the network or the request itself may
    be to blame."""

    slot: SlotId
    reason: str
    group: GroupId


@dataclass(frozen=True, slots=True)
class GroupClosed(NoticeBase):
    """The group is trained without its unfinished members."""

    group: Group


@dataclass(frozen=True, slots=True)
class StepClaimed(NoticeBase):
    """A step begins: ``train`` lacks only what of it the gradient workers compute."""

    train: Train


@dataclass(frozen=True, slots=True)
class StepOver(NoticeBase):
    """A step is done, or will never be.

    ``tokens`` and ``seconds`` are those of the trainer group's own part; zeros where it did none.
    """

    shares: tuple[ShareDone, ...] = ()
    tokens: float = 0.0
    seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class StepTaken(NoticeBase):
    """A step is done, its rows are written, and its version is told if there is one yet."""

    row: StepRecord


@dataclass(frozen=True, slots=True)
class VersionOut(NoticeBase):
    """A version can be fetched from the trainer's first node."""

    published: PublishedVersion


@dataclass(frozen=True, slots=True)
class VersionsLost(NoticeBase):
    """No version can be fetched until the trainer publishes another: its first node is gone."""


@dataclass(frozen=True, slots=True)
class ResizeRefused(NoticeBase):
    """The trainer cannot have the slots asked for: it is where it was, or on what is left of it."""

    why: str


@dataclass(frozen=True, slots=True)
class PlanMended(NoticeBase):
    """A failure has changed what is wanted of the slots."""


@dataclass(frozen=True, slots=True)
class BoundChosen(NoticeBase):
    """Groups are opened under another staleness bound from now on, in versions."""

    bound: int


Notice: TypeAlias = (
    ReplicaChanged
    | RoutingChanged
    | ProcessGone
    | ServerProved
    | ServerLost
    | ServerAnswered
    | TurnsBroken
    | RequestSent
    | RequestEnded
    | RequestBroke
    | GroupClosed
    | StepClaimed
    | StepOver
    | StepTaken
    | VersionOut
    | VersionsLost
    | ResizeRefused
    | PlanMended
    | BoundChosen
)
Result: TypeAlias = Action | Notice
"""What a part's method returns, in order: actions for the runtime, notices for other parts."""
