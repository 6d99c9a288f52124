"""``libra logs``: what a process on a host has written."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from libra_cli.config.errors import HostError, WrongRun
from libra_cli.config.secrets import masker, secrets_in
from libra_cli.config.text import printable
from libra_cli.core.records import ProcessRecord
from libra_cli.runtime.hosts.cluster import transport_to
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run, recipe_of


def _not_there(
    where: Path, rows: Sequence[ProcessRecord], node: str, process: str | None
) -> WrongRun:
    here = sorted({row.process for row in rows if row.node == node})
    if here:
        told = f"{where} has no process {process!r} on {node}: there are {', '.join(here)}"
        return WrongRun(told, hint=f"libra logs {node} {here[0]} --run {where}")
    nodes = sorted({row.node for row in rows})
    told = f"{where} has no process on {node!r}: its processes are on {', '.join(nodes) or 'none'}"
    hint = f"libra logs {nodes[0]} --run {where}" if nodes else f"libra status {where}"
    return WrongRun(told, hint=hint)


async def logs(
    node: str, process: str | None, run_dir: Path | None, *, follow: bool, lines: int
) -> AsyncIterator[str]:
    """``libra logs``: the log of one process on a host, or of all of them, line by line.

    What looks like a secret is masked, as in what is collected for others: logs are shown, too.

    Raises:
        WrongRun: no such run, node or process.
        HostError: the host cannot be reached, or a log is not there any more.
    """
    where = run_dir or newest_run()
    with Reader(where) as reader:
        rows = reader.processes()
    chosen = [row for row in rows if row.node == node and process in (None, row.process)]
    if not chosen:
        raise _not_there(where, rows, node, process)
    mask = masker(secrets_in(os.environ))
    transport = transport_to(recipe_of(where).node(node))
    await transport.connect()
    try:
        flags = ["-F"] if follow else []
        stream = await transport.open_stream(
            ["tail", "-n", str(lines), *flags, *(row.log for row in chosen)]
        )
        try:
            while line := await stream.readline():
                yield mask(printable(line.decode(errors="replace").rstrip("\n")))
            if await stream.exit_code():
                raise HostError(
                    f"{node}: {printable(stream.errors) or 'the connection broke'}",
                    hint=f"libra ps {where} lists what runs have left there",
                )
        finally:
            await stream.close()
    finally:
        await transport.close()
