"""Sends one version from rank 0 along the ranks: each passes on to the next what it has received.

So every link carries a version once, however many hosts take it. Blocks are received where they are
to stay, and sent from there: a rank that is slow or gone delays nobody before it, and those after
it see within ``STALL_S`` that nothing comes any more. What they have by then is theirs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from libra_cli.node.fabric.group import STALL_S

AHEAD = 8
"""Blocks that are under way at a time."""
_PATIENCE = timedelta(seconds=STALL_S)


def send(
    group: Any, to: int, blocks: Sequence[Tensor], may_send: Callable[[int], bool] | None = None
) -> None:
    """Send blocks in their order; ``may_send`` waits until the block of this number is there, and
    says whether it is.

    Raises:
        RuntimeError: the rank is gone, or takes nothing for ``STALL_S``.
    """
    under_way: deque[Any] = deque()
    for number, block in enumerate(blocks):
        if may_send is not None and not may_send(number):
            raise RuntimeError(f"block {number} did not come")
        under_way.append(group.send([block], to, number))
        if len(under_way) == AHEAD:
            under_way.popleft().wait(_PATIENCE)
    for work in under_way:
        work.wait(_PATIENCE)


def receive(group: Any, source: int, blocks: Sequence[Tensor], came: Callable[[int], None]) -> None:
    """Receive blocks in their order; ``came`` is called with the number of each.

    Raises:
        RuntimeError: the rank is gone, or nothing comes for ``STALL_S``.
    """
    expected: deque[Any] = deque()
    for number in range(len(blocks) + AHEAD):
        if number < len(blocks):
            expected.append(group.recv([blocks[number]], source, number))
        if number >= AHEAD:
            expected.popleft().wait(_PATIENCE)
            came(number - AHEAD)


class Relay:
    """Passes blocks on to the next rank behind their receipt."""

    def __init__(self, group: Any, to: int, blocks: Sequence[Tensor]) -> None:
        self._group = group
        self._to = to
        self._blocks = blocks
        self._came = 0
        self._is_over = False
        self._changed = threading.Condition()
        self.problem = ""
        """Why the next rank has not got all."""
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def came(self, count: int) -> None:
        """Note that the first ``count`` blocks are here."""
        with self._changed:
            self._came = count
            self._changed.notify()

    def end(self) -> None:
        """Note that no more blocks come."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until the next rank has all, or is given up."""
        self._thread.join()

    def _run(self) -> None:
        try:
            send(self._group, self._to, self._blocks, self._await)
        except RuntimeError as error:
            self.problem = str(error)

    def _await(self, number: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._came > number or self._is_over)
            return self._came > number
