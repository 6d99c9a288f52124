"""What every rank's ``main`` does around its work, in the trainer and in a gradient worker.

A rank that fails says why on stderr and exits with 1; its launcher and the broken connections take
the others down. If rank 0 fails, it first answers ``failed`` for LINGER_S or until told to stop, so
that whoever waits learns why.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Protocol

from libra_cli.config.errors import LibraError

LINGER_S = 30.0
log = logging.getLogger("libra.rank")


class FailureListener(Protocol):
    """The queue of rank 0."""

    def fail(self, error: str) -> None:
        """Everybody who waits is told."""

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Until someone has read it and says stop."""


def start_logging() -> None:
    """To stderr, which the host's agent keeps in a file."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )


def attempt(work: Callable[[], None], queue: FailureListener | None) -> int:
    """Do this rank's work; its exit code."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  whatever it is, who waits must be told
        if not isinstance(error, LibraError):
            traceback.print_exc()
        log.error("failed: %s", last_line(error))  # noqa: TRY400  printed above
        if queue is not None:
            queue.fail(last_line(error))
            queue.wait_for_stop(LINGER_S)
        return 1
    return 0


def last_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    return traceback.format_exception_only(error)[-1].strip()


@contextmanager
def answering(servers: Sequence[ThreadingHTTPServer]) -> Iterator[None]:
    """Take the servers down afterwards, whatever happens."""
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
