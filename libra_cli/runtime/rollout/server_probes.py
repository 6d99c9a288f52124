"""Reads every running server's counters, each by itself, and tells which has stalled.

A server that is frozen answers nothing; one whose engine hangs answers, and its counters stand
still while turns wait. Either is told once, as ``ServerFailed``. Probes run beside each other, each
with its own short deadline, so no server keeps the others from being looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from libra_cli.core.events import Event, ServerFailed, ServerSampled
from libra_cli.core.launch.process import process_of
from libra_cli.core.progress.watch import LEAST_S, ProgressWatch
from libra_cli.core.types import Seconds, SlotId, node_of
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.rollout.connection import ServerConnection
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.supervision.stalls import stall_reason

SAMPLE_EVERY_S = 2.0
PROBE_S = 5.0
"""A server answers between two steps of its engine, so mostly within milliseconds."""
FIRST_USE_S = 900.0
"""How long a server on GPUs may be silent before it has generated a first turn: kernels that are
compiled when a shape is first used (Triton, FlashInfer) hold its one process up for minutes."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A server that is looked at, and what the controller waits for there."""

    slot: SlotId
    watch: ProgressWatch = field(default_factory=ProgressWatch)
    turns: int = 0
    tokens: int | None = None
    """How many tokens the server had generated when it was first read; None before that."""
    told: bool = False


class ServerProbes:
    """Reads the counters of a run's servers, and tells which of them have stalled."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        on_gpus: Callable[[str], bool],
        post: Callable[[Event], None],
    ) -> None:
        """``on_gpus`` says whether the servers of a node are on GPUs."""
        self._cluster = cluster
        self._on_gpus = on_gpus
        self._post = post
        self._watched: dict[ServerConnection, _Watched] = {}

    def add(self, slot: SlotId, server: ServerConnection) -> None:
        """Read the counters of a server that runs from now on."""
        silent_s = FIRST_USE_S if self._on_gpus(node_of(slot)) else LEAST_S
        self._watched[server] = _Watched(slot, ProgressWatch(silent_s))

    def forget(self, server: ServerConnection) -> None:
        """Drop what is known of a stopped server."""
        self._watched.pop(server, None)

    async def run(self) -> None:
        """Look at all that there are, for ever."""
        probes: dict[ServerConnection, asyncio.Task[None]] = {}
        background = Background()
        try:
            while True:
                probes = {one: task for one, task in probes.items() if not task.done()}
                for server in self._watched.keys() - probes.keys():
                    probes[server] = background.start("a probe", self.look(server))
                await asyncio.sleep(SAMPLE_EVERY_S)
        finally:
            await background.close()

    async def look(self, server: ServerConnection) -> None:
        """Probe one server, and post its reading, or that it has stalled."""
        reading = await self._read(server)
        seen = self._watched.get(server)
        if seen is None:  # stopped meanwhile
            return
        sign: Hashable = None
        if reading is not None:
            self._post(reading)
            sign = reading.generated_tokens, reading.kv_use
            if seen.tokens is None:
                seen.tokens = reading.generated_tokens
            elif reading.generated_tokens > seen.tokens:
                seen.watch.least_s = LEAST_S
        watch, idle = seen.watch, not seen.turns and not seen.watch.allowed_s
        reachable = self.can_answer(node_of(seen.slot))
        stalled = watch.look(sign, now=self._cluster.clock(), idle=idle, reachable=reachable)
        if stalled and not seen.told:
            seen.told = True
            reason = await self.reason(seen.slot, server, watch.silent_s)
            self._post(ServerFailed(seen.slot, server.incarnation, reason))

    def can_answer(self, node: str) -> bool:
        """Whether an answer from there could be here by now: its agent, on the same link, has."""
        return node not in self._cluster.lost and self._cluster.hosts[node].behind_s < PROBE_S

    async def _read(self, server: ServerConnection) -> ServerSampled | None:
        try:
            async with asyncio.timeout(PROBE_S):
                return await server.sample()
        except Exception as error:  # noqa: BLE001  whatever it answers instead is no reading
            _log.debug("no reading: %s", error)
            return None

    async def reason(self, slot: SlotId, server: ServerConnection, silent_s: Seconds) -> str:
        """Why a server is taken out that was silent for so long."""
        node, process = node_of(slot), process_of(slot)
        seen = self._watched.get(server)
        turns = seen.turns if seen else 0
        what = f"with {turns} turns inside" if turns else "and answers nothing"
        return await stall_reason(self._cluster.hosts[node], node, process, what, silent_s)

    @contextmanager
    def turn(self, server: ServerConnection) -> Iterator[None]:
        """Count a turn as inside the server while the block runs."""
        seen = self._watched.get(server) or _Watched("")
        seen.turns += 1
        try:
            yield
        finally:
            seen.turns -= 1

    @contextmanager
    def loading(self, server: ServerConnection, limit_s: Seconds) -> Iterator[None]:
        """Expect no answer for so long from a server that loads a version."""
        watch = (self._watched.get(server) or _Watched("")).watch
        watch.allowed_s = limit_s
        try:
            yield
        finally:
            watch.allowed_s = 0.0
