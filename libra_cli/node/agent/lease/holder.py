"""The agent's side of the lease: the timer, and the guard that is started and watched.

Standard library only.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

from libra_cli.node.agent.lease.link import BEAT_S, LeaseLink, start_partner
from libra_cli.node.processes import proc
from libra_cli.node.processes.agent_log import log
from libra_cli.node.processes.proc import Marker

FIRST_LEASE_S = 60.0
"""The lease until a controller has said how long it wants."""
GUARD = "guard"
"""The name of the guard in the run's marker."""
GUARD_MODULE = "libra_cli.node.agent.lease.guard"


class Lease:
    """Calls ``over`` when no controller has been heard for as long as the lease; for the agent."""

    def __init__(self, run_dir: Path, link: LeaseLink | None, over: Callable[[], None]) -> None:
        """``link`` leads to the guard that started this agent, if one did."""
        self._run_dir = run_dir
        self._link = link
        self._over = over
        self._seconds = FIRST_LEASE_S
        self._deadline = time.monotonic() + FIRST_LEASE_S
        self._timer: asyncio.TimerHandle | None = None
        self._beats: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def seconds(self) -> float:
        return self._seconds

    @property
    def left_s(self) -> float:
        """Seconds until the lease ends if nobody is heard."""
        return self._deadline - time.monotonic()

    def open(self) -> None:
        """Set the timer, then find the guard or start one."""
        if self._link is not None:
            words, _ = self._link.hear()
            for word in words:
                self._deadline, self._seconds = word.deadline, word.lease_s
        self._set_timer()
        self._beats = asyncio.create_task(self._beat())
        if self._link is None:  # an earlier agent's guard knows another lease
            _kill_guards(Marker.of(self._run_dir))
            self._start_guard()
        else:
            self._listen(self._link)

    def renew(self, seconds: float | None = None) -> None:
        """A controller was heard, and may say how long the lease is from now on."""
        if seconds is not None:
            self._seconds = seconds
        self._deadline = time.monotonic() + self._seconds
        self._set_timer()
        if seconds is not None and self._link is not None:
            self._link.tell(self._deadline, self._seconds)

    def close(self) -> None:
        """Let the guard die, which is stopped with the rest."""
        self._is_closed = True

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left_s = max(0.0, self.left_s)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._over)

    async def _beat(self) -> None:
        while True:
            if self._link is None and not self._is_closed:
                self._start_guard()
            elif self._link is not None:
                self._link.tell(self._deadline, self._seconds)
                if self._link.is_frozen():
                    self._replace_guard()
            await asyncio.sleep(BEAT_S)

    def _replace_guard(self) -> None:
        if self._link is not None and self._link.partner is not None:
            proc.send(self._link.partner, signal.SIGKILL)
        self._hang_up()

    def _start_guard(self) -> None:
        try:
            arguments = self._run_dir, self._deadline, self._seconds
            self._link = start_partner([GUARD_MODULE], GUARD, *arguments)
        except OSError as error:
            log(f"no guard: {error}")  # the next beat tries again
        else:
            self._listen(self._link)

    def _listen(self, link: LeaseLink) -> None:
        asyncio.get_running_loop().add_reader(link.socket, self._hear, link)

    def _hear(self, link: LeaseLink) -> None:
        _, is_there = link.hear()
        if is_there:
            return
        self._hang_up()
        if not self._is_closed:
            log("the guard died: starting another")
            self._start_guard()

    def _hang_up(self) -> None:
        if self._link is not None:
            asyncio.get_running_loop().remove_reader(self._link.socket)
            self._link.close()
            self._link = None


def _kill_guards(marker: Marker) -> None:
    for identity, name in marker.marked_processes().items():
        if name == GUARD:
            proc.send(identity, signal.SIGKILL)
