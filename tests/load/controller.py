"""``libra``, with a clock in its event loop: appends how late the loop was to a file.

python controller.py FILE run RECIPE
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Coroutine
from typing import Any

from libra_cli.cli.main import main

EVERY_S = 0.005
"""Between two looks."""
WRITE_S = 1.0


async def watch(path: str) -> None:
    """Append seconds of lag as float64, for ever."""
    lags, written = array("d"), time.monotonic()
    while True:
        asked = time.monotonic() + EVERY_S
        await asyncio.sleep(EVERY_S)
        lags.append(time.monotonic() - asked)
        if time.monotonic() - written > WRITE_S:
            with open(path, "ab") as file:  # noqa: ASYNC230 - a few hundred bytes
                lags.tofile(file)
            lags, written = array("d"), time.monotonic()


if __name__ == "__main__":
    lag_file = sys.argv.pop(1)
    run = asyncio.run

    def watched(work: Coroutine[Any, Any, Any], **more: Any) -> Any:
        """What ``asyncio.run`` does, watched."""

        async def both() -> Any:
            watching = asyncio.create_task(watch(lag_file))
            try:
                return await work
            finally:
                watching.cancel()

        return run(both(), **more)

    asyncio.run = watched  # type: ignore[assignment]
    main()
