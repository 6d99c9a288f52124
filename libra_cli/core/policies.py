"""Placement policies: which server gets a trajectory's next turn.

A policy sees only the past of a trajectory, and only servers with a free seat. It answers with a
slot, or None to keep the request waiting at the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from libra_cli.core.types import Bucket, Seconds, SlotId, Tokens, TrajectoryId


@dataclass(frozen=True, slots=True)
class Request:
    """A trajectory that wants its next turn generated."""

    trajectory: TrajectoryId
    context: Tokens
    turns: int
    waiting_since: Seconds
    last_slot: SlotId | None


@dataclass(frozen=True, slots=True)
class ServerView:
    """What a policy may know of a server. ``running`` counts our own requests inside it."""

    slot: SlotId
    bucket: Bucket
    running: int

    @property
    def load(self) -> float:
        """Share of its seats that are taken."""
        return self.running / self.bucket.max_num_seqs

    @property
    def has_seat(self) -> bool:
        """Whether one more request may enter now."""
        return self.running < self.bucket.max_num_seqs


class Policy(Protocol):
    """The seam of every scheduler in libra."""

    def place(self, request: Request, servers: Sequence[ServerView]) -> SlotId | None:
        """The server for this request, or None to wait. ``servers`` may be empty."""
        ...


class LeastLoaded:
    """The server with the smallest share of its seats taken; ties go to the first."""

    def place(self, request: Request, servers: Sequence[ServerView]) -> SlotId | None:
        free = [server for server in servers if server.has_seat]
        return min(free, key=lambda server: server.load).slot if free else None


class StickyLeastLoaded(LeastLoaded):
    """Stay where the prefix cache is while there is a seat; else the least loaded server."""

    def place(self, request: Request, servers: Sequence[ServerView]) -> SlotId | None:
        for server in servers:
            if server.slot == request.last_slot and server.has_seat:
                return server.slot
        return super().place(request, servers)


POLICIES: dict[str, type[Policy]] = {
    "least-loaded": LeastLoaded,
    "sticky-least-loaded": StickyLeastLoaded,
}
"""By the names a recipe uses."""
