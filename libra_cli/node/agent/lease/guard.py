"""The guard of an agent: it holds the lease too, and starts the agent again when it dies.

    python -m libra_cli.node.agent.lease.guard RUN_DIR DESCRIPTOR   # the agent starts it so

It does three things, and nothing that needs a disk before it has done them:

    the agent died      start another, which takes over the processes, the lease and the token
    the agent is mute   for ``SILENCE_S``: kill it, so that it is started anew
    the lease is over   and the agent, ``AGENT_S`` later, is still there: stop everything of the
                        run, again and again until nothing is left, then end

Standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libra_cli.node.agent.lease.link import BEAT_S, LeaseLink, start_partner
from libra_cli.node.processes import proc
from libra_cli.node.processes.agent_log import log
from libra_cli.node.processes.stop import stop_everything

AGENT_S = 30.0
"""What an agent may take after the lease to stop everything itself, which needs at most twenty."""
LONGEST_PAUSE_S = 30.0
AGAIN_S = 60.0
AGENT_MODULE = "libra_cli.node.agent.main"


@dataclass(slots=True)
class Guard:
    """Watches one agent. ``stop`` stops everything of the run and tells whether nothing is left."""

    run_dir: Path
    link: LeaseLink | None
    deadline: float
    lease_s: float
    start: Callable[[float, float], LeaseLink]
    stop: Callable[[], bool]
    _pause_s: float = 0.0
    _start_at: float = field(default=0.0)

    def watch(self) -> None:
        """Watch until the lease is over and nothing is left."""
        while not self.is_over:
            self.turn()
        log("the lease is over, and the agent is not done: stopping everything")
        while not self.stop():
            time.sleep(AGAIN_S)

    @property
    def is_over(self) -> bool:
        """Whether it is for the guard to act: at the end of the lease, or later with an agent."""
        return time.monotonic() > self.deadline + (AGENT_S if self.link is not None else 0.0)

    def turn(self) -> None:
        """Wait for a word of the agent, at most a beat, and do what follows from it."""
        if self.link is None:
            self._start_again()
            return
        select.select([self.link.socket], [], [], BEAT_S)
        words, is_there = self.link.hear()
        for word in words:
            self.deadline, self.lease_s, self._pause_s = word.deadline, word.lease_s, 0.0
        if not is_there:
            self._lose("the agent died")
        elif self.link.is_frozen() and self.link.partner is not None:
            proc.send(self.link.partner, signal.SIGKILL)
            self._lose("the agent did not run, and was killed")
        else:
            self.link.tell(self.deadline, self.lease_s)

    def _lose(self, why: str) -> None:
        assert self.link is not None, "it was there"
        self.link.close()
        self.link = None
        log(f"{why}: starting another")

    def _start_again(self) -> None:
        time.sleep(max(0.0, min(self._pause_s, self.deadline - time.monotonic())))
        self._pause_s = min(max(BEAT_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        try:
            self.link = self.start(self.deadline, self.lease_s)
        except OSError as error:
            log(f"no agent: {error}")


def main(arguments: Sequence[str]) -> int:
    """Guard the agent of a run directory, which has the other end of the descriptor."""
    run_dir, link = Path(arguments[0]), LeaseLink(socket.socket(fileno=int(arguments[1])))
    os.chdir(run_dir)
    (*_, word), _ = link.hear()
    Guard(
        run_dir,
        link,
        word.deadline,
        word.lease_s,
        start=lambda deadline, lease_s: start_partner(
            [AGENT_MODULE, "serve"], "agent", run_dir, deadline, lease_s
        ),
        stop=lambda: not stop_everything(run_dir).leftovers,
    ).watch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
