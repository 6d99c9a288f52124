"""Daemon threads for functions that may never return.

A thread runs one function at a time and is reused for the next; a thread that is stuck is never
idle again, and the next function gets a new one. So stuck functions block neither others nor the
end of the process, and a usual call wakes a thread instead of starting one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

_Inbox: TypeAlias = "SimpleQueue[Callable[[], object] | None]"


class Threads:
    """Runs functions, which may not raise. ``run`` and ``close`` belong to the owner's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self._idle: list[_Inbox] = []
        """Inboxes of the idle threads. All threads use only pop and append, which are atomic."""

    def run(self, function: Callable[[], object]) -> None:
        """Call the function in a thread of its own."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(inbox,), name=self._name, daemon=True
            ).start()
        inbox.put(function)

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
            if self._closed:
                self.close()  # the owner may have called it before this thread was idle
