"""Files with what long work has found: their place is looked at before the work begins."""

from __future__ import annotations

import os
from pathlib import Path

from libra_cli.config.errors import InputError, LibraError


def check_place(path: Path, *, hint: str) -> None:
    """Make the directory that a file is to lie in, and see that the file can be written there.

    Raises:
        InputError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise InputError(f"{path} cannot be written: {reason}", hint=hint) from error
    if path.is_dir():
        raise InputError(f"{path} is a directory, and a file is written", hint=hint)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written: there is no right to", hint=hint)


def make_empty(directory: Path, *, hint: str) -> None:
    """Make a directory that files are to be copied into, unless it is there and empty.

    Raises:
        InputError: it cannot be made or written, or something lies in it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        taken = any(directory.iterdir())
    except FileExistsError as error:
        raise InputError(f"{directory} is a file, and a directory is made", hint=hint) from error
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise InputError(f"{directory} cannot be written: {reason}", hint=hint) from error
    if taken:
        raise InputError(f"{directory} is not empty", hint=hint)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InputError(f"{directory} cannot be written: there is no right to", hint=hint)


def write_result(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        LibraError: it cannot be written any more, as where a disk is full.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = f"df -h {path.parent}"
        raise LibraError(f"{path} cannot be written: {error.strerror}", hint=hint) from error
