"""The clock that a run's machine and records use."""

from __future__ import annotations

import time

from libra_cli.core.types import Seconds


class RunClock:
    """Seconds since 1970 that only ever go forwards, so that no duration can be negative."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> Seconds:
        return self._offset + time.monotonic()

    def not_before(self, at: Seconds) -> None:
        """Go on from this time at least, which another controller's clock had reached."""
        self._offset = max(self._offset, at - time.monotonic())
