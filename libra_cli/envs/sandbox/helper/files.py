"""Reads and writes files of a place from within it, so that no link leads out."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from typing import Any

from libra_cli.envs.sandbox.helper.place import Enclosure


def read(place: Enclosure, told: Mapping[str, Any]) -> bytes:
    """Return at most ``limit`` bytes of a file, from its beginning.

    Raises:
        OSError: there is no such file, or it may not be read.
    """
    place.enter()
    path = os.path.join(place.work, told["path"])
    # A pipe would wait for who writes into it.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _check_regular(file.fileno(), path)
        return file.read(told["limit"])


def write(place: Enclosure, told: Mapping[str, Any], data: bytes) -> None:
    """Make a file, or replace its bytes, and make the directories that it is in.

    Raises:
        OSError: that cannot be done.
    """
    place.enter()
    path = os.path.join(place.work, told["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "wb") as file:
        _check_regular(file.fileno(), path)
        file.truncate(0)
        file.write(data)
        if told.get("mode") is not None:
            os.fchmod(file.fileno(), told["mode"])


def _check_regular(fd: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
