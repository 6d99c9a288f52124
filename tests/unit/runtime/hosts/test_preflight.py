"""What the controller makes ready of itself before a run."""

from __future__ import annotations

import subprocess
import sys

LOWERED = """
import resource
from libra_cli.runtime.hosts.preflight import open_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard))
told = open_files()
held = [open("/dev/null") for _ in range(64)]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
unlimited = hard == resource.RLIM_INFINITY
assert soft == hard, (soft, hard)
assert told == (None if unlimited else hard), (told, hard)
"""
"""In a process of its own, whose limit is nobody else's."""


def test_the_controller_may_open_as_many_files_as_the_system_allows() -> None:
    done = subprocess.run([sys.executable, "-c", LOWERED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
