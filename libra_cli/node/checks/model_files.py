"""Reads every byte of a model directory, and prints the SHA-256 of each file as one line of JSON.

    python -m libra_cli.node.checks.model_files DIRECTORY KNOWN

    out    {"files": {name: [bytes, sha256]}}

``KNOWN`` is a file in which it keeps what it has read: a file of the same inode, size and times is
not read again, so that a server that is started again does not wait for it. It runs beside the
start of a server, which reads the same files: at the lowest priority, and a few files at a time.
Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COUNTED = (".safetensors", ".bin", ".pt", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""Endings of files that a server may load; a README is not one."""
AT_ONCE = 4
"""Files that are read at a time: SHA-256 takes a core for each, and a disk is soon busy."""


def files_of(directory: Path, known: Path) -> dict[str, tuple[int, str]]:
    """Return the size in bytes and the SHA-256 of each file that counts, by name.

    Raises:
        OSError: a file cannot be read, or has changed while it was.
    """
    before = _read_known(known)
    paths = sorted(one for one in directory.iterdir() if one.suffix in COUNTED and one.is_file())

    def read(path: Path) -> tuple[list[int], str]:
        state = _state(path)
        if (told := before.get(str(path))) is not None and told[0] == state:
            return told
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _state(path) != state:
            raise OSError(f"{path} has changed while it was read")
        return state, digest

    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = dict(zip(map(str, paths), threads.map(read, paths), strict=True))
    _write_known(known, found)
    return {path.name: (path.stat().st_size, found[str(path)][1]) for path in paths}


def _state(path: Path) -> list[int]:
    """What changes when a file does: nobody can set the last of these times back."""
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_known(known: Path) -> dict[str, tuple[list[int], str]]:
    try:
        return {path: (state, digest) for path, (state, digest) in json.loads(known.read_bytes())}
    except (OSError, ValueError):  # the first time, or cut where a disk was full
        return {}


def _write_known(known: Path, found: dict[str, tuple[list[int], str]]) -> None:
    part = known.with_suffix(".part")
    part.write_text(json.dumps(list(found.items())))
    part.replace(known)


def main() -> None:
    """Print the files of the directory that the command line names."""
    os.nice(19)
    try:
        files = files_of(Path(sys.argv[1]), Path(sys.argv[2]))
    except OSError as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps({"files": files}) + "\n")


if __name__ == "__main__":
    main()
