"""``libra logs``: what a process on a host has written."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

from libra_cli.config.errors import WrongRun
from libra_cli.config.secrets import masker, secrets_in
from libra_cli.config.text import printable
from libra_cli.runtime.hosts.cluster import transport_to
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run, recipe_of


async def logs(
    node: str, process: str | None, run_dir: Path | None, *, follow: bool, lines: int
) -> AsyncIterator[str]:
    """``libra logs``: the log of one process on a host, or of all of them, line by line.

    What looks like a secret is masked, as in what is collected for others: logs are shown, too.

    Raises:
        WrongRun: no such run, node or process.
        HostError: the host cannot be reached.
    """
    where = run_dir or newest_run()
    with Reader(where) as reader:
        rows = [row for row in reader.processes() if row.node == node]
    chosen = [row for row in rows if process in (None, row.process)]
    if not chosen:
        known = ", ".join(sorted({row.process for row in rows})) or "none"
        raise WrongRun(
            f"{where} has no process {process or ''} on {node!r} (there: {known})",
            hint=f"libra status {where} lists the nodes",
        )
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
        finally:
            await stream.close()
    finally:
        await transport.close()
