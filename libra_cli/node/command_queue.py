"""The queue between the HTTP threads of rank 0 and its working loop: commands in, results out.

The trainer and the gradient workers extend it with commands and results of their own. Everything
that threads share is guarded by one condition. Needs no torch, so rank 0 answers while it imports.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Generic, TypeVar

from libra_cli.node.http import Answer, refusal


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Tells every rank to leave."""


@dataclass(frozen=True, slots=True)
class IdleCommand:
    """Tells the ranks that nothing came, so that none waits long without hearing from rank 0."""


CommandT = TypeVar("CommandT")


@dataclass(kw_only=True)
class BaseCommandQueue(Generic[CommandT]):
    """State, failure and end of a rank 0, and the commands that wait for it."""

    state: str = "starting"
    """``starting | ready | failed``"""
    error: str = ""
    stopping: bool = False
    _commands: deque[CommandT | StopCommand] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # The working loop's side.

    def next(self, timeout_s: float) -> CommandT | StopCommand | IdleCommand:
        """Remove and return the oldest command, or ``IdleCommand`` after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands), timeout_s)
            return self._commands.popleft() if self._commands else IdleCommand()

    def fail(self, error: str) -> None:
        """Record that this process can do no more, and wake everybody who waits for a result."""
        with self._changed:
            self.state, self.error = "failed", error
            self._changed.notify_all()

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Wait after a failure for the stop of whoever has read it; tell whether one came."""
        with self._changed:
            return self._changed.wait_for(lambda: self.stopping, timeout_s)

    # The HTTP threads' side.

    def stop(self) -> Answer:
        """Queue the end, after the commands that are waiting."""
        with self._changed:
            self.stopping = True
            self._add(StopCommand())
        return HTTPStatus.ACCEPTED, {"state": "stopping"}

    def _add(self, command: CommandT | StopCommand) -> None:
        """Queue a command. The caller holds the condition."""
        self._commands.append(command)
        self._changed.notify_all()

    def _unavailable(self, name: str) -> Answer | None:
        """Answer 503 unless commands can be taken. The caller holds the condition."""
        if self.state == "ready" and not self.stopping:
            return None
        reason = self.error or f"{name} is {'stopping' if self.stopping else self.state}"
        return refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason)
