"""Files of a host whose names it tells itself: they become paths only if they are plain names."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

from libra_cli.config.errors import HostError
from libra_cli.config.text import one_line
from libra_cli.runtime.hosts.transport import Transport

LIST_S = 30.0
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+=@~ -]{0,254}")
"""A file's own name: no way to another directory, not hidden, nothing that a terminal obeys."""
_log = logging.getLogger(__name__)


def safe_name(name: str) -> str:
    """Return a name that a host told, if it may be a part of a path here or on another host.

    Raises:
        HostError: it may lead elsewhere.
    """
    if NAME.fullmatch(name):
        return name
    raise HostError(f"{one_line(repr(name))} is no name for a file")


async def names_in(transport: Transport, directory: str) -> list[str]:
    """The names of a host's directory that are safe; any other is passed over, and logged.

    Raises:
        HostError: there is no such directory, or the host does not answer.
    """
    done = await transport.run(["ls", "-1", directory], timeout_s=LIST_S)
    if done.exit_code:
        raise HostError(f"{transport.target}: {directory}: {done.last_words}")
    names = []
    for line in done.stdout.decode(errors="replace").splitlines():
        try:
            names.append(safe_name(line))
        except HostError as error:
            _log.warning("%s: %s: %s", transport.target, directory, error)
    return names


async def fetch_tokenizer(transport: Transport, source: str, target: Path) -> None:
    """Copy the configuration, the tokenizer and the chat template into a directory here.

    Raises:
        HostError: the host does not answer, or a file cannot be read.
    """
    names = await names_in(transport, source)
    await asyncio.to_thread(target.mkdir, mode=0o700, parents=True, exist_ok=True)
    for name in names:
        if name.endswith((".json", ".jinja")) and not name.endswith(".index.json"):
            data = await transport.get(f"{source}/{name}")
            await asyncio.to_thread((target / name).write_bytes, data)
