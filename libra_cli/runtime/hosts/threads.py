"""Daemon threads for code that may never return.

A thread serves one function at a time and is reused for the next; one that is stuck is simply never
idle again, and the next function gets a new thread. So there is nothing that could fill up, a stuck
thread keeps no process from ending, and the usual call costs a wake-up instead of a new stack.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

_Inbox: TypeAlias = "SimpleQueue[Callable[[], object] | None]"


class Threads:
    """``run`` and ``close`` are for one thread, the owner's; functions may not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self._idle: list[_Inbox] = []
        """Inboxes of the threads that wait. Both ends use only pop and append, which are atomic."""

    def run(self, function: Callable[[], object]) -> None:
        """Call the function in a thread that does nothing else meanwhile."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(inbox,), name=self._name, daemon=True
            ).start()
        inbox.put(function)

    def close(self) -> None:
        """End the threads: the idle ones now, the others as soon as they come back."""
        self._closed = True
        with contextlib.suppress(IndexError):  # both ends may come here at the same time
            while True:
                self._idle.pop().put(None)

    def _serve(self, inbox: _Inbox) -> None:
        while (function := inbox.get()) is not None:
            function()
            # What the function holds (an environment) must not live until the next one comes.
            del function
            self._idle.append(inbox)
            if self._closed:
                self.close()  # it may have looked before this thread was idle
