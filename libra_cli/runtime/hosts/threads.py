"""Daemon threads for functions that may never return.

A thread runs one function at a time and is reused for the next; a thread that is stuck is never
idle again, and the next function gets a new one. So stuck functions block neither others nor the
end of the process, and a usual call wakes a thread instead of starting one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from libra_cli.config.errors import LibraError

_log = logging.getLogger(__name__)

_Inbox: TypeAlias = "SimpleQueue[Callable[[], object] | None]"


class Threads:
    """Runs functions, which may not raise. ``run`` and ``close`` belong to the owner's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self._idle: list[_Inbox] = []
        """Inboxes of the idle threads. All threads use only pop and append, which are atomic."""
        self._waiting: deque[Callable[[], object]] = deque()
        """Functions that no thread could be started for."""
        self._has_threads = False

    def run(self, function: Callable[[], object]) -> None:
        """Call the function in a thread of its own, which it waits for if the system has no more.

        Raises:
            LibraError: not one thread can be started.
        """
        try:
            self._idle.pop().put(function)
        except IndexError:
            self._start(function)

    def _start(self, function: Callable[[], object]) -> None:
        inbox: _Inbox = SimpleQueue()
        inbox.put(function)
        thread = threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._has_threads:
                raise LibraError(
                    f"no thread: {error}", hint="see: ulimit -u; cat /proc/loadavg"
                ) from error
            _log.warning("a call waits for one of the threads that there are: %s", error)
            self._waiting.append(function)
            self._hand_out()
        else:
            self._has_threads = True

    def _hand_out(self) -> None:
        """Give what waits to idle threads; owner and threads may do so at the same time."""
        with contextlib.suppress(IndexError):
            while self._waiting:
                inbox = self._idle.pop()
                try:
                    inbox.put(self._waiting.popleft())
                except IndexError:
                    self._idle.append(inbox)

    def close(self) -> None:
        """End the idle threads now, and the others when their functions return."""
        self._closed = True
        with contextlib.suppress(IndexError):  # owner and thread may be here at the same time
            while True:
                self._idle.pop().put(None)

    def _serve(self, inbox: _Inbox) -> None:
        while (function := inbox.get()) is not None:
            function()
            # What the function holds (an environment) must not live until the next one comes.
            del function
            self._idle.append(inbox)
            self._hand_out()
            if self._closed:
                self.close()  # the owner may have called it before this thread was idle
