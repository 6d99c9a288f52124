"""Runs a rank of the trainer or of a gradient worker, and reports its failure.

A rank that fails says why on stderr and exits with 1; its launcher and the broken connections end
the others. If rank 0 fails, it first answers ``failed`` for LINGER_S or until told to stop, so that
whoever waits learns why.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from libra_cli.config.errors import LibraError

if TYPE_CHECKING:
    from libra_cli.node.model.policy import PolicyModel

LINGER_S = 30.0
log = logging.getLogger("libra.rank")


class FailureListener(Protocol):
    """The part of rank 0's queue that hears of a failure."""

    def fail(self, error: str) -> None:
        """Record the failure and answer everybody who waits with it."""

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Wait until somebody has read the failure and sends a stop."""


def start_logging() -> None:
    """Log to stderr, which the host's agent keeps in a file."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )


def attempt(work: Callable[[], None], queue: FailureListener | None) -> int:
    """Do this rank's work and return its exit code."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  who waits must be told of any failure
        if not isinstance(error, LibraError):
            traceback.print_exc()
        log.error("failed: %s", last_line(error))  # noqa: TRY400  printed above
        if queue is not None:
            queue.fail(last_line(error))
            queue.wait_for_stop(LINGER_S)
        return 1
    return 0


def log_ready(log: logging.Logger, policy: PolicyModel, started: float) -> None:
    """Log how long a rank took to become ready since ``started`` (of ``time.monotonic``)."""
    log.info(
        "rank %d of %d is ready after %.1f s%s",
        policy.rank,
        policy.world,
        time.monotonic() - started,
        f" (sharded over {policy.shards}, {policy.replicas} replicas)" if policy.sharded else "",
    )


def last_line(error: BaseException) -> str:
    """Return an error's type, message and hint in one line."""
    line = traceback.format_exception_only(error)[-1].strip()
    hint = error.hint if isinstance(error, LibraError) else ""
    return f"{line}; next: {hint}" if hint else line
