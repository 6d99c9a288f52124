"""Unix sockets for tests."""

from __future__ import annotations

import atexit
import shutil
import tempfile


def socket_path() -> str:
    """In a directory of its own, as short as the path of a socket must be, which goes at the end
    of the tests."""
    directory = tempfile.mkdtemp(prefix="libra-test-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return f"{directory}/s"
