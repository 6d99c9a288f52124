"""Makes one archive of a run: versions, recipe, database, status, ends of the hosts' logs.

Guarantee: what looks like a secret is masked in every file (``config.secrets``), and so is each
value of this process's environment whose variable has the name of one; token ids, from which
prompts and answers could be read, are left out. Nothing is changed in the run or on its hosts.
Limit: logs hold what processes have written, which may be text of an environment or an agent.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from libra_cli import __version__
from libra_cli.config.errors import LibraError, StateError
from libra_cli.config.recipe import NodeSpec
from libra_cli.config.secrets import MASK, masker, secrets_in
from libra_cli.core.records import ProcessRecord
from libra_cli.report.status.summary import summary, to_json
from libra_cli.runtime.doctor.host_logs import host_logs
from libra_cli.runtime.store.copy import copy_without_texts
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import RECIPE, newest_run, recipe_of
from libra_cli.runtime.store.schema import DATABASE
from libra_cli.runtime.supervision.controller_log import FILE as CONTROLLER_LOG

_ABOUT = """What libra collect has put together of the run {run}.

versions.json   libra, Python and packages where it was collected; what the hosts said of themselves
recipe.json     the recipe with all its defaults, without its secrets
status.json     libra status --json
controller.log  what the controller logged, with the tracebacks of unexpected errors
libra.db        the run's database, without token ids: libra status DIRECTORY reads it
metrics.jsonl   the metrics of every step
logs/           the end of what each process has written, by host
problems.txt    what could not be collected, and why

What looks like a secret reads {mask}. Look through it before you send it to anybody.
"""


@dataclass(frozen=True, slots=True)
class Collected:
    """The archive that ``libra collect`` has written, and what is in it."""

    path: Path
    bytes: int
    files: tuple[tuple[str, int], ...]
    """Pairs of a file's name in the archive and its size in bytes."""
    masked: int
    """How many secrets were masked; of the database, how many texts."""
    problems: tuple[str, ...]
    """A line for each thing that could not be collected, with the reason."""


class _Archive:
    """An archive that is being made; every text goes through the mask."""

    def __init__(self, path: Path, name: str, mask: Callable[[str], str]) -> None:
        self._tar = tarfile.open(path, "w:gz")  # noqa: SIM115  closed by close
        self._name = name
        self._mask = mask
        self.files: list[tuple[str, int]] = []
        self.masked = 0

    def text(self, name: str, text: str) -> None:
        """Add a text file whose secrets this method masks first."""
        seen = self._mask(text)
        self.masked += seen.count(MASK) - text.count(MASK)
        self._add(name, seen.encode())

    def _add(self, name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(f"{self._name}/{name}")
        entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
        self._tar.addfile(entry, io.BytesIO(data))
        self.files.append((name, len(data)))

    def file(self, name: str, path: Path) -> None:
        """Add a file from disk whose secrets the caller has masked already."""
        self._tar.add(path, f"{self._name}/{name}", filter=_anonymous)
        self.files.append((name, path.stat().st_size))

    def close(self) -> None:
        self._tar.close()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uname = entry.gname = ""
    return entry


def collect(run_dir: Path | None, target: Path | None) -> Collected:
    """Make the archive, readable by its owner only, in the working directory unless told where.

    Raises:
        StateError: there is no such run.
        LibraError: the archive cannot be written.
    """
    where = (run_dir or newest_run()).absolute()
    name = where.name
    path = target or Path(f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    mask = masker(secrets_in(os.environ))
    try:
        with Reader(where) as reader:
            _make_private(path)
            archive = _Archive(path, f"libra-{name}", mask)
            try:
                problems = tuple(map(mask, _fill(archive, reader, where, mask)))
            finally:
                archive.close()
    except OSError as error:
        raise LibraError(f"{error.filename or path}: {error.strerror}", hint="df -h .") from error
    return Collected(path, path.stat().st_size, tuple(archive.files), archive.masked, problems)


def _make_private(path: Path) -> None:
    """Empty a file, or make it; one that was there is its owner's alone from now on, too."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.fchmod(file, 0o600)
    finally:
        os.close(file)


def _fill(archive: _Archive, reader: Reader, where: Path, mask: Callable[[str], str]) -> list[str]:
    problems: list[str] = []
    archive.text("README.txt", _ABOUT.format(run=where.name, mask=MASK))
    archive.text("versions.json", json.dumps(_versions(reader), indent=2))
    archive.text("status.json", to_json(summary(reader, now=time.time())))
    for name in (RECIPE, "metrics.jsonl"):
        if (where / name).is_file():
            archive.text(name, (where / name).read_text(encoding="utf-8", errors="replace"))
        else:
            problems.append(f"{where} has no {name}")
    for log in sorted(where.glob(f"{CONTROLLER_LOG}*")):  # older libra wrote none
        archive.text(log.name, log.read_text(encoding="utf-8", errors="replace"))
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, DATABASE)
        archive.masked += copy_without_texts(reader, copy, mask)
        archive.file(DATABASE, copy)
    problems += _logs(archive, where, reader.processes())
    archive.text("problems.txt", "\n".join([*problems, ""]) if problems else "none\n")
    return problems


def _versions(reader: Reader) -> dict[str, object]:
    packages = {one.name: one.version for one in metadata.distributions()}
    return {
        "libra": __version__,
        "run": reader.meta.get("libra", ""),
        "python": sys.version,
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
        "hosts": {row.node: row.facts for row in reader.nodes()},
    }


def _logs(archive: _Archive, where: Path, processes: Sequence[ProcessRecord]) -> Iterator[str]:
    try:
        nodes: tuple[NodeSpec, ...] = recipe_of(where).nodes
    except StateError as error:
        yield f"no log, since the hosts are not known: {error}"
        return
    for host in asyncio.run(host_logs(nodes, processes)):
        for process, data in host.logs.items():
            archive.text(f"logs/{host.node}/{process}.log", data.decode(errors="replace"))
        yield from host.problems
