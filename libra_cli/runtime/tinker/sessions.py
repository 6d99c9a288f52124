"""The sessions of clients, each under a lease that the SDK's heartbeats renew.

A client that ends says so, but one that is killed, or whose machine is lost, says nothing more.
What it had is let go of when nothing was heard of it for the time of the lease.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from libra_cli.config.errors import LibraError

LEASE_S = 300.0
"""Seconds; chosen. The SDK sends a heartbeat every 10, and warns its user after 120 without one."""
TRAINS = ":train:"
"""Between the id of a session and the number of a model, in the model's id."""


class SessionEnded(LibraError):
    """A request of a session that has ended, or that there never was."""


@dataclass(slots=True)
class ClientSession:
    """What a client has asked for."""

    heard_at: float
    models: dict[str, str] = field(default_factory=dict)
    """The ids of the adapters that it trains, and under which the outcome of the creation of each
    is asked for."""
    samplers: dict[str, str | None] = field(default_factory=dict)
    """The path of the adapter of each of its sampling sessions, None of the model itself."""
    unnamed: list[str] = field(default_factory=list)
    """Paths that were saved for a sampling session alone, under no name that the client knows."""


class Sessions:
    """The sessions of clients that are there, by their ids."""

    def __init__(
        self, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._sessions: dict[str, ClientSession] = {}

    def open(self) -> str:
        """Begin a session and return its id."""
        name = secrets.token_hex(8)
        self._sessions[name] = ClientSession(self._clock())
        return name

    def hear(self, name: str) -> ClientSession:
        """Renew a session's lease and return it; raises SessionEnded."""
        if name not in self._sessions:
            raise SessionEnded(f"session {name} has ended", hint="create another ServiceClient")
        session = self._sessions[name]
        session.heard_at = self._clock()
        return session

    def hear_of(self, model_id: str) -> ClientSession:
        """Renew the lease of the session that trains a model; raises SessionEnded."""
        return self.hear(session_of(model_id))

    def end(self, name: str) -> ClientSession | None:
        """Take a session out and return it, None where there is none."""
        return self._sessions.pop(name, None)

    def names(self) -> list[str]:
        """Return the ids of all sessions."""
        return list(self._sessions)

    def heard(self) -> list[tuple[str, float, ClientSession]]:
        """Return all sessions with their ids, and the seconds since each was heard of."""
        now = self._clock()
        return [(name, now - one.heard_at, one) for name, one in self._sessions.items()]

    def silent(self) -> list[str]:
        """Return the ids of sessions whose lease is over."""
        oldest = self._clock() - self.lease_s
        return [name for name, one in self._sessions.items() if one.heard_at < oldest]

    def sampler(self, sampler: str) -> tuple[str, str | None]:
        """Return whose a sampling session is, and the path of its adapter; raises SessionEnded."""
        for name, session in self._sessions.items():
            if sampler in session.samplers:
                return name, session.samplers[sampler]
        raise SessionEnded(f"there is no sampling session {sampler}")

    def sampled_paths(self) -> set[str]:
        """Return the paths of all adapters that sampling sessions name."""
        found = {path for one in self._sessions.values() for path in one.samplers.values()}
        return {path for path in found if path is not None}


def session_of(model_id: str) -> str:
    """Return the id of the session in which a model is trained."""
    return model_id.partition(TRAINS)[0]
