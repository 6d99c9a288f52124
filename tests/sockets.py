"""Unix sockets for tests, and HTTP over them."""

from __future__ import annotations

import atexit
import http.client
import shutil
import socket
import tempfile


def socket_path() -> str:
    """In a directory of its own, as short as the path of a socket must be, which goes at the end
    of the tests."""
    directory = tempfile.mkdtemp(prefix="libra-test-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return f"{directory}/s"


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float = 60.0) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
