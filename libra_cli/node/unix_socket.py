"""Unix sockets that only this user can reach: in a directory that nobody else can enter.

Standard library only.
"""

from __future__ import annotations

import os
import socket

LONGEST = 107
"""Bytes of the path of a socket (unix(7))."""


def bind_unix(path: str) -> socket.socket:
    """A socket that is bound to a path, and does not listen yet.

    It replaces one that a killed process has left. Its directory is made if it is not there.

    Raises:
        OSError: the path is too long, or the directory is not this user's alone.
    """
    if len(os.fsencode(path)) > LONGEST:
        raise OSError(f"{path}: a socket's path has {LONGEST} bytes at most; set a shorter TMPDIR")
    directory = os.path.dirname(path)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    about = os.lstat(directory)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise OSError(f"{directory}: others may enter it, so no socket is made there")
    if os.path.lexists(path):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    return sock
