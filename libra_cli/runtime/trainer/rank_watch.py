"""Watches the ranks of the trainer or of a gradient worker: is each running, and does it go on?

Every rank tells what it is at in a file of its host (``node.heartbeat``). A collective waits for
its slowest rank, and rank 0 says "running" all the while; here the one that keeps the others
waiting is named. A file that cannot be read says nothing: whether the host is there is for others
to find out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from libra_cli.config.errors import LibraError
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.progress.phases import phase_limit_s
from libra_cli.core.progress.watch import ProgressWatch
from libra_cli.core.types import Seconds
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.supervision.stalls import stall_reason

LOOK_EVERY_S = 4.0
READ_S = 4.0
RECORD_BYTES = 256
"""Bytes of each rank's record, as ``node.heartbeat`` writes it."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A rank's record in the file that ``node.heartbeat`` describes."""

    rank: int
    incarnation: int
    beat: int
    count: int
    phase: str


def read_records(data: bytes, incarnation: int) -> Iterator[RankRecord]:
    """The records of a file that are of this incarnation; what is no record is left out."""
    for start in range(0, len(data), RECORD_BYTES):
        try:
            record = RankRecord(**json.loads(data[start : start + RECORD_BYTES].strip(b"\0 ")))
        except (ValueError, TypeError):
            continue
        if record.incarnation == incarnation:
            yield record


@dataclass(slots=True)
class _Rank:
    """One rank: is its process running, and does it go on?"""

    beats: ProgressWatch = field(default_factory=ProgressWatch)
    goes_on: ProgressWatch = field(default_factory=ProgressWatch)

    def look(self, record: RankRecord, now: Seconds) -> str:
        """What is wrong with it; empty if nothing is."""
        at = f"(rank {record.rank}, {record.phase})"
        if self.beats.look(record.beat, now=now):
            return f"{at}: it is stopped"
        self.goes_on.least_s = phase_limit_s(record.phase)
        if self.goes_on.look((record.phase, record.count), now=now):
            return f"{at}: it runs, and does not go on"
        return ""

    @property
    def silent_s(self) -> Seconds:
        stopped = self.beats.is_stalled
        return self.beats.silent_s if stopped else self.goes_on.silent_s


class RankWatch:
    """All ranks of one world, started as ``processes``, one on each of its nodes."""

    def __init__(
        self, cluster: Cluster, processes: Sequence[ProcessSpec], incarnation: int
    ) -> None:
        self._cluster = cluster
        self._incarnation = incarnation
        #: The name of each node's process, and the file that its ranks write.
        self._files = {spec.node: (spec.process, _file_of(spec)) for spec in processes}
        self._ranks: dict[tuple[str, int], _Rank] = {}
        #: Reads that are under way. One that a hung disk keeps is not followed by another, since
        #: each holds a thread and a session of the connection, and pings need those too.
        self._reads: dict[str, asyncio.Task[bytes]] = {}

    async def until_stalled(self) -> str:
        """Look until a rank has stalled, for ever if none does; returns what to tell of it."""
        try:
            return await self._until_stalled()
        finally:
            for reading in self._reads.values():
                reading.cancel()

    async def _until_stalled(self) -> str:
        while True:
            found = await asyncio.gather(*(self._look(node) for node in self._files))
            stalled = [one for ranks in found for one in ranks]
            if stalled:
                # A process that is stopped keeps others waiting, which do nothing wrong.
                node, what, silent_s = min(stalled, key=lambda one: "stopped" not in one[1])
                host, (process, _) = self._cluster.hosts[node], self._files[node]
                return await stall_reason(host, node, process, what, silent_s)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self, node: str) -> list[tuple[str, str, Seconds]]:
        records = await self._read(node)
        now = self._cluster.clock()
        stalled = []
        for record in records:
            rank = self._ranks.setdefault((node, record.rank), _Rank())
            if what := rank.look(record, now):
                stalled.append((node, what, rank.silent_s))
        return stalled

    async def _read(self, node: str) -> list[RankRecord]:
        host, (_, name) = self._cluster.hosts[node], self._files[node]
        if node not in self._reads:
            reading = host.transport.get(f"{host.run_dir}/{name}")
            self._reads[node] = asyncio.ensure_future(reading)
        done, _ = await asyncio.wait({self._reads[node]}, timeout=READ_S)
        if not done:
            return []
        try:
            data = await self._reads.pop(node)
        except LibraError:
            return []
        return list(read_records(data, self._incarnation))


async def stalled_rank(cluster: Cluster, processes: Sequence[ProcessSpec], incarnation: int) -> str:
    """Look until a rank of these processes has stalled; returns what to tell of it."""
    return await RankWatch(cluster, processes, incarnation).until_stalled()


def _file_of(spec: ProcessSpec) -> str:
    """Beside the configuration of its ranks, below the run directory."""
    (config,) = [name for name in spec.files if name.endswith(".json")] or [""]
    return config.removesuffix(".json") + ".progress"
