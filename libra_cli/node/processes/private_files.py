"""Small files that only their owner may read, and that are whole or not there. Standard library."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write a file (mode 0600) beside its place, and move it there: a full disk leaves the old one.

    Raises:
        OSError: it cannot be written; nothing has changed.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "x", opener=private, encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def make_private(directory: Path) -> None:
    """Make a directory, and those above it that are not there, that only their owner can enter."""
    if not directory.parent.exists():
        make_private(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


def private(path: str, flags: int) -> int:
    """Open a file, for its owner only if it is made: an opener for ``open``."""
    return os.open(path, flags, mode=0o600)
