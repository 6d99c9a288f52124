"""What an environment's factory gets as ``sandbox``: a way to open those that the recipe means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from libra_cli.config.errors import SandboxBroken
from libra_cli.envs.sandbox.client import ALLOW
from libra_cli.envs.sandbox.sandbox import Sandbox, Snapshot, open_sandbox
from libra_cli.envs.sandbox.spec import SandboxSpec

_TRY_S = 30.0


class Sandboxes:
    """Opens sandboxes as the recipe's ``environment.sandbox`` says."""

    def __init__(self, spec: SandboxSpec | None = None) -> None:
        """Open sandboxes of a kind; without one, of that which a recipe has by default."""
        self.spec = spec or SandboxSpec()

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Sandboxes:
        """Return what opens the sandboxes of a recipe, once one was opened and could be used.

        Raises:
            SandboxBroken: this host can have none, with what to do about that as its hint.
        """
        _try(json.dumps(told, sort_keys=True))
        return cls(SandboxSpec.of(told))

    def open(self, base: Snapshot | None = None) -> Sandbox:
        """Open a sandbox, with the files of a snapshot.

        Raises:
            SandboxBroken: this host cannot have it.
        """
        return open_sandbox(self.spec, base)


@cache
def _try(told: str) -> None:
    """Run a command in such a sandbox; once in a process, as it is asked for every episode."""
    with open_sandbox(SandboxSpec.of(json.loads(told))) as sandbox:
        done = sandbox.run(":", timeout_s=_TRY_S)
    if done.code:
        raise SandboxBroken(f"a sandbox cannot run /bin/sh: {done.stderr or done.code}", hint=ALLOW)
