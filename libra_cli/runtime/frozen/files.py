"""Compares the files of a frozen model on every host that serves it, before anything is answered.

What the first host tells is what the model is, or what an earlier controller of the run has
recorded. A host reads the files beside the start of its server, and again before each later start;
what has not changed since is not read twice.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence

from libra_cli.config.errors import ProcessError
from libra_cli.core.frozen.files import difference, digest_of, files_process
from libra_cli.core.frozen.slots import FrozenSlot
from libra_cli.core.records import FrozenModelRecord, Record
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.supervision.answers import understood

READ_S = 3600.0
"""Seconds for reading a whole model from a slow disk."""


class ServedFiles:
    """The files of a run's frozen models, as their hosts hold them."""

    def __init__(self, cluster: Cluster, save: Callable[[Record], None]) -> None:
        self._cluster = cluster
        self._save = save
        self._known: dict[tuple[str, str], FrozenModelRecord] = {}
        self._reading: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def recorded(self, rows: Sequence[FrozenModelRecord]) -> None:
        """Take in what the models of the run were until now; one under another path is another."""
        self._known |= {(row.model, row.path): row for row in rows}

    async def compare(self, frozen: FrozenSlot) -> str:
        """Return the SHA-256 of the directory that a server loads, once it was read.

        Raises:
            ProcessError: it cannot be read, or is not what the run serves under this name.
            HostLost: its host was given up.
        """
        async with self._reading[frozen.node.name]:  # servers of one host read the same disk
            row = await self._read(frozen)
        first = self._known.setdefault((row.model, row.path), row)
        if what := difference(row.files, first.files):
            raise _differs(row, first, what)
        self._save(row)
        return row.digest

    async def _read(self, frozen: FrozenSlot) -> FrozenModelRecord:
        node, model = frozen.node.name, frozen.model
        path = self._cluster.hosts[node].expand(model.path)
        process = files_process(frozen, self._cluster.facts[node], path=path)
        began = self._cluster.clock()
        answer = await self._cluster.answer_of(process, timeout_s=READ_S)
        now = self._cluster.clock()
        with understood(ProcessError, f"{node}: the files of {path}"):
            found = answer["files"].items()
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in found}
        return FrozenModelRecord(
            model=model.name,
            node=node,
            path=model.path,
            digest=digest_of(files),
            bytes=sum(size for size, _ in files.values()),
            at=now,
            seconds=now - began,
            files_json=json.dumps(files),
        )


def _differs(row: FrozenModelRecord, first: FrozenModelRecord, what: str) -> ProcessError:
    if row.node == first.node:
        return ProcessError(
            f"{row.path} on {row.node} is not what it was when the run served it before: {what}",
            hint="put the files back, or name another path for other files",
        )
    return ProcessError(
        f"{row.path} on {row.node} is not what {first.node} has there: {what}",
        hint=f"on {row.node}: rsync -a {first.node}:{row.path}/ {row.path}/; or name two models",
    )
