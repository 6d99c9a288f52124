"""What tests of sandboxes need of the machine, and where they must not do without."""

from __future__ import annotations

import os
import shutil

import pytest

from libra_cli.envs.sandbox.sandbox import open_sandbox
from libra_cli.envs.sandbox.spec import SandboxSpec


def missing() -> str:
    """Why there are no sandboxes here; empty where there are, and where there must be."""
    if os.environ.get("CI"):
        return ""
    return "" if shutil.which("bwrap") else "there is no bwrap (apt-get install bubblewrap)"


needs_sandboxes = pytest.mark.skipif(bool(missing()), reason=missing() or "sandboxes can be opened")


def opened(**keys: object):
    """Open a sandbox, as a context."""
    return open_sandbox(SandboxSpec.of(keys))
