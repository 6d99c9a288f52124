"""The gate in front of the servers.

vLLM's ``priority`` orders its waiting queue but does not preempt a full batch, so libra admits to a
server only as many requests as it has seats (``max_num_seqs``) and keeps the others here, where
they can still be sent anywhere. Requests leave in the order they came (no request can be overtaken
by one that came later and could have used the same server, so none starves); which server they get
is the policy's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from libra_cli.core.policies import Policy, Request, ServerView
from libra_cli.core.types import SlotId, TrajectoryId


class Scheduler:
    """Waiting requests, and the policy that places them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._waiting: dict[TrajectoryId, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self._waiting[request.trajectory] = request

    def withdraw(self, trajectory: TrajectoryId) -> None:
        """Forget a request, if it waits here."""
        self._waiting.pop(trajectory, None)

    def dispatch(self, servers: Iterable[ServerView]) -> Iterator[tuple[Request, SlotId]]:
        """Take out, first come first served, every request that a server has a seat for."""
        views = {server.slot: server for server in servers}
        for request in list(self._waiting.values()):
            if not any(server.has_seat for server in views.values()):
                return
            slot = self._policy.place(request, list(views.values()))
            if slot is None:
                continue
            views[slot] = replace(views[slot], running=views[slot].running + 1)
            del self._waiting[request.trajectory]
            yield request, slot
