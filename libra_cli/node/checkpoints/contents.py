"""What a checkpoint's files must be: their names, sizes and checksums. Standard library only.

``checkpoint.json`` is written last, and tells of every file of every host::

    files    name -> bytes, sha256, and of a shard the host that wrote it
    sha256   of all else that it says

A checkpoint is whole where the hosts that are there have all of these files between them. Those of
libra 0.1.0 tell of no files; they are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from libra_cli.config.errors import NONSENSE, TrainerError

COMPLETE = "checkpoint.json"
"""The file that a checkpoint's directory has once it is complete."""
READERS = 8
"""Files that are summed up at once; hashlib lets go of the interpreter meanwhile."""


def about_bytes(about: Mapping[str, Any]) -> bytes:
    """Return the text of ``checkpoint.json``: ``about``, and the SHA-256 of all that it says."""
    return json.dumps({**about, "sha256": _sum_of(about)}).encode()


def about_of(data: bytes, where: object) -> dict[str, Any]:
    """Return what a ``checkpoint.json`` says.

    Raises:
        TrainerError: it is damaged; ``where`` it lies is told.
    """
    try:
        about = json.loads(data)
        told = about.pop("sha256", None)
        int(about["step"])
    except NONSENSE as error:
        raise TrainerError(f"{where} is damaged: {type(error).__name__}: {error}") from error
    if told != (_sum_of(about) if "files" in about else None):
        raise TrainerError(f"{where} is damaged: its checksum is another")
    return dict(about)


def _sum_of(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def listed(directory: Path, names: Iterable[str], host: str) -> dict[str, dict[str, Any]]:
    """Return the entries of these files of a directory, which ``host`` wrote."""
    names = sorted(names)
    with ThreadPoolExecutor(READERS) as pool:
        entries = pool.map(_entry, [directory / name for name in names])
        return {name: {**entry, "host": host} for name, entry in zip(names, entries, strict=True)}


def damaged(directory: Path, about: Mapping[str, Any]) -> list[str]:
    """Return in words what is wrong with the files that are in this directory.

    What is not there is no damage: another host may have it.
    """
    files: Mapping[str, Mapping[str, Any]] = about.get("files", {})
    here = [name for name in sorted(files) if (directory / name).is_file()]
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: _problem(directory / name, files[name]), here)
        return [problem for problem in found if problem]


def here_of(directory: Path, about: Mapping[str, Any]) -> list[str]:
    """Return the names of the files that are in this directory."""
    return [name for name in sorted(about.get("files", {})) if (directory / name).is_file()]


def _problem(path: Path, entry: Mapping[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path.name} has {size:,} bytes of {entry['bytes']:,}"
        return "" if _entry(path)["sha256"] == entry["sha256"] else f"{path.name} has other bytes"
    except OSError as error:
        return f"{path.name} cannot be read: {os.strerror(error.errno or 0)}"


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}
