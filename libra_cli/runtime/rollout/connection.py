"""What the runtime half of a rollout backend does: how the controller talks to one server.

The pure half (``libra_cli.core.launch.rollout_backend``) names the class by its import path. It is
made with the server's slot, its incarnation, the endpoint to reach it at and the run's token. Every
wait has a deadline, every failure is a ``ServerError`` that names the server, and tokens go in and
come out: nothing here ever sees text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from libra_cli.config.errors import ServerError
from libra_cli.core.actions import Generate
from libra_cli.core.events import PublishedVersion, ServerSampled, TurnFailed, TurnGenerated
from libra_cli.core.launch.rollout_backend import ROLLOUT_BACKENDS, rollout_backend
from libra_cli.core.types import SlotId
from libra_cli.plugins.finding import find
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.store.images import ShownImage


class RequestRefused(ServerError):
    """The server answered that the request itself is wrong."""


class ServerUnreachable(ServerError):
    """No answer came: the server, its host or the network."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of turns are sampled, and when a turn ends."""

    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    to_the_end: bool = False
    """Always as many tokens as are allowed, whatever the model says: to measure with."""
    vocabulary: int = 2**31
    """A token id is below it: the rows of the model's embedding. No bound if they are not known."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a running server says of itself."""

    version: str
    kv_tokens: int
    """Capacity of its KV cache."""
    engine: str
    """What of its engine runs, in words for ``libra status``."""


class ServerConnection(Protocol):
    """What the controller calls of a server; only ``generate`` and ``close`` raise no
    ServerError.
    """

    incarnation: int
    """Generation number of the server's process; an answer of an old one is dropped."""

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return when it is healthy *and* able to generate one token."""
        ...

    async def check(self) -> None:
        """Return if it says that it is healthy."""
        ...

    async def generate(
        self, action: Generate, sampling: Sampling, images: Sequence[ShownImage] = ()
    ) -> TurnGenerated | TurnFailed:
        """Generate one turn, with the log-probability and the weight version of every token;
        ``images`` are those that tokens of the prompt stand for.

        Never raises: a failure is an event of its own. KV is reused of weight versions from
        ``action.kv_key`` on, never of older ones.
        """
        ...

    async def abort(self, request: int) -> None:
        """End a generation; its reply then has what there is."""
        ...

    async def load(
        self,
        directory: str,
        published: PublishedVersion,
        *,
        timeout_s: float,
        partly: bool = False,
        clear_cache: bool = True,
    ) -> float:
        """Load a version in place, in flight. Returns the seconds generation stood still.

        Without ``clear_cache`` turns in flight and later ones may use KV of the versions before. A
        server that then holds other tensors than were published, or with ``partly`` False some of
        which it cannot tell, generates no more and says so by a ServerError.
        """
        ...

    async def probe(self, token_ids: Sequence[int], published: PublishedVersion) -> list[float]:
        """Log-probabilities, in nats, of ``token_ids[1:]``, each given everything before it."""
        ...

    async def facts(self) -> ServerFacts:
        """Ask for the server's release, the size of its KV cache, and what of it runs."""
        ...

    async def sample(self) -> ServerSampled:
        """Read the server's counters."""
        ...

    async def close(self) -> None:
        """Drop the connections; the server itself is not touched."""
        ...


@runtime_checkable
class CanSleep(Protocol):
    """What a connection has besides if its servers can sleep; both raise ServerError."""

    async def sleep(self) -> None:
        """Return once it has given back weights and KV cache, or had before."""
        ...

    async def wake(self) -> None:
        """Return once it has room for them again, so that a version can be loaded."""
        ...


SLEEP_S = 120.0
"""Seconds that falling asleep or waking may take: to unmap and map the memory of a GPU are seconds;
one without sleep mode writes zeros to its KV cache."""


class Connect(Protocol):
    """Makes the connection to one server; the class of a runtime half is one."""

    def __call__(
        self, slot: SlotId, incarnation: int, endpoint: Endpoint, token: str
    ) -> ServerConnection:
        """Open nothing yet: the first request does."""
        ...


def connect_with(backend: str) -> Connect:
    """The runtime half of the rollout backend of that name. Raises PluginError."""
    connect: Connect = find(ROLLOUT_BACKENDS, rollout_backend(backend).connection)
    return connect


def turn_failed(
    action: Generate, reason: str, *, refused: bool = False, unreachable: bool = False
) -> TurnFailed:
    """Return the failure of this request; ``refused`` means that trying again is of no use, and
    ``unreachable`` that no answer came."""
    return replace(action.failed(reason), refused=refused, unreachable=unreachable)
