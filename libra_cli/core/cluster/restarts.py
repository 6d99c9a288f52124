"""How often, and how soon, a process that has ended is started again.

    worked     0 ---------- 600 s ---------- 1200 s     time in which it did its work
    deaths        x x  x                    x           the three count together, the fourth alone

A death counts until the process has worked for ``WINDOW_S`` since; so one that dies at once every
time comes to the end of its budget however long it takes to start, and one that dies now and then
never does. Each death that counts doubles the wait before the next start, and the first costs none.
What has used up its budget is tried again after ``LATER_S``, and so is one whose GPU is lost, which
costs nothing of the budget: another start on it would only fail.

The numbers are those of the kubelet (waits of 10 s, doubled up to 300 s, forgotten after 10 minutes
of work: kubernetes.io, Pod Lifecycle) and of systemd (5 starts: systemd.unit, StartLimitBurst).
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_cli.core.types import LostGpu, Seconds

WINDOW_S: Seconds = 600.0
"""Seconds of useful work after which a death no longer counts."""
MAX_RESTARTS = 5
"""Deaths that may count together before a process is given up."""
FIRST_WAIT_S: Seconds = 10.0
MOST_WAIT_S: Seconds = 300.0
LATER_S: Seconds = 1800.0
"""Seconds after which something given up is tried once more. Chosen: a neighbour's job on the GPUs,
or a full disk, may have gone by then, and six starts in three hours disturb nobody.
"""


def told_of(lost: Sequence[LostGpu]) -> str:
    """Return that these GPUs are lost, and what to type about it; empty if none is."""
    if not lost:
        return ""
    gpus, hosts = ", ".join(map(str, lost)), ", ".join(dict.fromkeys(gpu.node for gpu in lost))
    are = "are" if len(lost) > 1 else "is"
    return f"{gpus} {are} lost; on {hosts}: nvidia-smi -L; sudo dmesg | grep -i xid; a reboot helps"


class RestartBudget:
    """The deaths of one process that still count. Times are seconds of the machine's clock."""

    def __init__(self) -> None:
        #: How long it had worked, over all its lives, at each death that counts.
        self._deaths: list[Seconds] = []
        self._worked_s: Seconds = 0.0
        self._works_since: Seconds = 0.0

    def works(self, *, now: Seconds) -> None:
        """Count from anew: the process does its work."""
        self._works_since = now

    def worked(self, *, now: Seconds) -> None:
        """Count the time since ``works``, or since the last call of this, as useful work."""
        self._worked_s += max(0.0, now - self._works_since)
        self._works_since = now

    def wait_s(self, most: int = MAX_RESTARTS) -> Seconds | None:
        """Take in a death and return the seconds until the next start; None if the budget is spent.

        ``most``: deaths that may count together.
        """
        self._deaths = [at for at in self._deaths if self._worked_s - at < WINDOW_S]
        if len(self._deaths) >= most:
            return None
        self._deaths.append(self._worked_s)
        counted = len(self._deaths) - 1
        return min(MOST_WAIT_S, FIRST_WAIT_S * 2.0 ** (counted - 1)) if counted else 0.0

    def refill(self) -> None:
        """Forget every death so far."""
        self._deaths.clear()
