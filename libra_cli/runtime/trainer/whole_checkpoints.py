"""Finds the checkpoint that a run goes on from: the newest that the hosts have whole, as written.

Which are there is asked of the hosts' disks, since a controller that was killed may not have heard
of the last. Each host reads its part through and compares it with what ``checkpoint.json`` says; a
checkpoint that is damaged, or that a host which is not there any more had a part of, is passed over
and told.

Of two the one of the later trainer is newer, and then the one of the later step. A trainer that was
followed by another left checkpoints that nobody had heard of beside the run's past: those are none.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from libra_cli.config.errors import NONSENSE, LibraError, StateError
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.trainer.checkpoints import COMMAND_S, answer_of, directory_of

VERIFY_S = 1800.0
"""The longest that a host may read: 1 TB at 600 MB/s."""
_NAME = re.compile(r"step-(\d{1,12})(?:-e(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A checkpoint from which a run can go on."""

    path: str
    """The directory on a host that has a part of it."""
    position: dict[str, Any]
    """The controller's part of it: what the next controller goes on from."""
    trainer_incarnation: int
    """The last that any trainer of the run had."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one host says of its part of a checkpoint."""

    about: dict[str, Any] | None
    here: tuple[str, ...]
    damaged: tuple[str, ...]
    ledger: dict[str, Any] | None


async def newest_whole(
    hosts: Mapping[str, Host],
    known: Collection[str],
    trainer_incarnation: int,
    *,
    note: Callable[[str], None],
) -> WholeCheckpoint:
    """Find the newest checkpoint that is whole on these hosts. ``known`` are the names of the
    run's, and ``trainer_incarnation`` is its last trainer's, as far as it has told of them.

    Raises:
        StateError: no checkpoint is whole on these hosts.
    """
    found = await asyncio.gather(*(_names_on(host) for host in hosts.values()))
    nodes = {
        name: [node for node, names in zip(hosts, found, strict=True) if name in names]
        for names in found
        for name in names
    }
    newest = max([trainer_incarnation, *(_written_at(name)[0] for name in nodes)])
    problems: list[str] = []
    for name in sorted(nodes, key=_written_at, reverse=True):
        if name not in known and _written_at(name)[0] < trainer_incarnation:
            continue
        there = {node: hosts[node] for node in nodes[name]}
        parts = dict(zip(there, await asyncio.gather(*_asked(there, name)), strict=True))
        wrong = what_is_wrong(parts)
        ledger = next((part.ledger for part in parts.values() if part.ledger), None)
        if not wrong and ledger is not None:
            for problem in problems:
                note(f"{problem}; going on from {name}")
            return WholeCheckpoint(directory_of(there[nodes[name][0]], name), ledger, newest)
        problems.append(f"checkpoint {name} cannot be used: {'; '.join(wrong)}")
    raise _none(hosts, problems)


def what_is_wrong(parts: Mapping[str, _Part]) -> list[str]:
    """Say what is damaged on which host, and whose part is missing; nothing of a whole one."""
    wrong = [f"{what} on {node}" for node, part in parts.items() for what in part.damaged]
    abouts = [part.about for part in parts.values() if part.about is not None]
    if wrong or not abouts:
        return wrong or ["no host says what is in it"]
    here = {name for part in parts.values() for name in part.here}
    files: Mapping[str, Mapping[str, Any]] = abouts[0].get("files", {})
    missing = sorted(set(files) - here)
    wrote = sorted({str(files[name].get("host", "")) for name in missing} - {""})
    who = f", which {' and '.join(wrote)} wrote" if wrote else ""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return [f"no host here has {', '.join(missing[:3])}{more}{who}"] if missing else []


def _written_at(name: str) -> tuple[int, int]:
    """Trainer incarnation and step of a checkpoint; libra 0.1.0 gave it no incarnation."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[2] or -1), int(match[1])


async def _names_on(host: Host) -> set[str]:
    """The complete checkpoints on a host; one that does not answer has none."""
    root = directory_of(host, "")
    try:
        done = await host.transport.run(["ls", "-1", root], timeout_s=COMMAND_S)
    except LibraError:
        return set()
    return {name for name in done.stdout.decode(errors="replace").split() if _NAME.fullmatch(name)}


def _asked(hosts: Mapping[str, Host], name: str) -> list[Any]:
    return [_part(host, name) for host in hosts.values()]


async def _part(host: Host, name: str) -> _Part:
    argv = host.module_argv("libra_cli.node.checkpoints.verify")
    try:
        stream = await host.transport.open_stream([*argv, directory_of(host, name)])
        try:
            async with asyncio.timeout(VERIFY_S):
                told = await answer_of(stream)
        finally:
            await stream.close()
        return _Part(
            _about(told["about"]),
            tuple(map(str, told["here"])),
            tuple(map(str, told["damaged"])),
            told["ledger"] if isinstance(told["ledger"], dict) else None,
        )
    except (LibraError, TimeoutError, *NONSENSE) as error:
        return _Part(None, (), (f"it cannot be read ({type(error).__name__}: {error})",), None)


def _about(told: object) -> dict[str, Any] | None:
    """What a part says of the files of its checkpoint; raises where that is no such table."""
    if not isinstance(told, dict):
        return None
    files = told.get("files", {})
    if not all(isinstance(file, dict) for file in files.values()):
        raise TypeError("its files are no table")
    return told


def _none(hosts: Mapping[str, Host], problems: list[str]) -> StateError:
    told = "\n".join(["no checkpoint of the run is whole on its hosts", *problems])
    where = ", ".join(f"{node}:{directory_of(host, '')}" for node, host in hosts.items())
    return StateError(
        told,
        hint=f"name the hosts that have the rest in nodes again; looked at: {where}. "
        "Else start anew: libra run RECIPE",
    )
