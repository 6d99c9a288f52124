"""Threads for functions that may never return."""

from __future__ import annotations

import queue
import threading
from functools import partial

import pytest

from libra_cli.config.errors import LibraError
from libra_cli.runtime.hosts.threads import Threads

DEADLINE_S = 5


@pytest.fixture
def no_more_threads(monkeypatch):
    """From now on the system starts no thread."""

    def forbid() -> None:
        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)

    return forbid


def test_a_function_waits_for_a_thread_if_the_system_starts_no_more(no_more_threads):
    threads, done, go = Threads("test"), queue.SimpleQueue[int](), threading.Event()
    threads.run(lambda: go.wait(DEADLINE_S))
    no_more_threads()
    for number in range(3):
        threads.run(partial(done.put, number))
    assert done.empty()
    go.set()
    assert [done.get(timeout=DEADLINE_S) for _ in range(3)] == [0, 1, 2]
    threads.close()


def test_without_a_single_thread_it_is_told_at_once(no_more_threads):
    no_more_threads()
    with pytest.raises(LibraError, match="can't start new thread") as caught:
        Threads("test").run(print)
    assert "ulimit" in caught.value.hint


def test_a_function_that_waited_leaves_its_thread_to_the_next(no_more_threads):
    threads, done = Threads("test"), queue.SimpleQueue[int]()
    threads.run(lambda: done.put(0))
    assert done.get(timeout=DEADLINE_S) == 0
    no_more_threads()
    for number in range(1, 200):
        threads.run(partial(done.put, number))
    assert sorted(done.get(timeout=DEADLINE_S) for _ in range(1, 200)) == list(range(1, 200))
    threads.close()
