"""The queue between the control stream of a rank 0 and its working loop: commands in, results out.

The trainer and the gradient workers extend it with commands and results of their own. Everything
that the two threads share is guarded by one condition. Needs no torch, so rank 0 answers while it
imports.

    operation   order   answer
    check       {}      {} at once
    ready       {}      when every rank is there: see the subclass
    stop        {}      {}: all ranks leave after what they are doing
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from libra_cli.config.errors import ProcessError, TrainerError
from libra_cli.node.connections import Connection, Connections
from libra_cli.node.control import Answer, ControlServer
from libra_cli.node.unix_socket import bind_unix

Later: TypeAlias = Callable[[], Answer | None]
"""The answer to an order, or None while there is none; asked again after every change."""


def taken() -> Answer:
    """Return the answer to an order that says only that it was taken."""
    return {}


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Tells every rank to end after what it is doing."""


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
    changed: Callable[[], None] = lambda: None
    """Called after every change, with the condition held."""
    _commands: deque[CommandT | StopCommand] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # The working loop's side.

    def next(self, timeout_s: float) -> CommandT | StopCommand | IdleCommand:
        """Remove and return the oldest command, or ``IdleCommand`` after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands), timeout_s)
            return self._commands.popleft() if self._commands else IdleCommand()

    def fail(self, error: str) -> None:
        """Record that this process can do no more, and tell everybody who waits for a result."""
        with self._changed:
            self.state, self.error = "failed", error
            self._tell()

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Wait after a failure for the stop of whoever has read it; tell whether one came."""
        with self._changed:
            return self._changed.wait_for(lambda: self.stopping, timeout_s)

    # The control thread's side.

    def take(self, operation: str, order: Mapping[str, Any]) -> Later:
        """Carry out an order, or queue it. No two threads may.

        Raises:
            KeyError, TypeError, ValueError, TrainerError: it cannot be taken.
            ProcessError: this process can do no more.
        """
        match operation:
            case "check":
                return taken
            case "ready":
                return self._later(lambda: self._about() if self.state == "ready" else None)
            case "stop":
                self.stop()
                return taken
            case _:
                raise KeyError(f"no operation {operation!r}")

    def _about(self) -> Answer:
        """Return what ``ready`` is answered with besides; subclasses have more."""
        return {}

    def stop(self) -> None:
        """Queue the end, after the commands that are waiting."""
        with self._changed:
            self.stopping = True
            self._add(StopCommand())

    def _add(self, command: CommandT | StopCommand) -> None:
        """Queue a command. The caller holds the condition."""
        self._commands.append(command)
        self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for a change. The caller holds the condition."""
        self._changed.notify_all()
        self.changed()

    def _later(self, find: Later) -> Later:
        """Find an answer with the condition held; one that a failure has left out raises."""

        def found() -> Answer | None:
            with self._changed:
                answer = find()
                if answer is None and self.state == "failed":
                    raise ProcessError(self.error)
                return answer

        return found

    def _check_available(self, name: str) -> None:
        """Raise unless commands can be taken. The caller holds the condition."""
        if self.state == "failed":
            raise ProcessError(self.error)
        if self.state != "ready" or self.stopping:
            raise TrainerError(f"the {name} is {'stopping' if self.stopping else self.state}")


class RankServer(ControlServer):
    """Answers for a queue, in a daemon thread of its own."""

    def __init__(self, queue: BaseCommandQueue[Any], *, path: str, token: str) -> None:
        """Listen on a Unix socket. Raises OSError, see ``bind_unix``."""
        super().__init__(Connections(bind_unix(path), token))
        self._queue = queue
        self._awaited: list[tuple[Connection, int, Later]] = []
        queue.changed = self._connections.wake
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def _run(self) -> None:
        while True:
            for connection, message in self._connections.receive(wait=True):
                if message is None:
                    self._awaited = [one for one in self._awaited if one[0] is not connection]
                else:
                    self._obey(connection, message)
            self._awaited = [one for one in self._awaited if not self._say(*one)]
            self._connections.flush()

    def _perform(
        self, connection: Connection, call: int, operation: str, order: dict[str, Any]
    ) -> Answer | None:
        later = self._queue.take(operation, order)
        answer = later()
        if answer is None:
            self._awaited.append((connection, call, later))
        return answer
