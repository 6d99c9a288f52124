"""The control stream of a process: orders of the controller come in, answers go out.

It is a Unix socket that only this user can reach, and nothing is answered before the run's token
has come (``connections``). The controller sends ``[call, operation, order]``; the answer is
``[call, "done", answer]``, or ``[call, "refused" | "failed", reason]``. Calls are numbers of its
own. Any number of them may be open, and each is answered when there is something to say: at once,
or when a turn has ended, a step is done, a version is complete. ``check`` is answered by all.

A connection that closes takes its open calls with it. Who asks the trainer again loses nothing and
does nothing twice, since every order there names the step that it is about.

Rollout servers and the first ranks of the trainer and of gradient workers are spoken to so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from libra_cli.config.errors import LibraError, TrainerError
from libra_cli.node.connections import Connection, Connections, Message

Answer: TypeAlias = dict[str, Any]

_REFUSALS = (KeyError, TypeError, ValueError, TrainerError)
"""What an order raises that cannot be taken; anything else is a failure of the process."""


class ControlServer:
    """Carries out the orders that come over connections; subclasses know the operations."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def _perform(
        self, connection: Connection, call: int, operation: str, order: dict[str, Any]
    ) -> Answer | None:
        """Carry out one operation; None if its answer comes later."""
        raise NotImplementedError

    def _obey(self, connection: Connection, message: Message) -> None:
        """Carry out an order, and answer it unless that is for later."""
        match message:
            case [call, operation, order]:
                self._say(
                    connection, call, lambda: self._perform(connection, call, operation, order)
                )
            case _:
                connection.send([0, "refused", "no order is of this form"])

    def _say(self, connection: Connection, call: int, answer: Callable[[], Answer | None]) -> bool:
        """Answer a call with what this returns or raises; False if it returned None."""
        try:
            found = answer()
            if found is not None:
                connection.send([call, "done", found])
        except Exception as error:  # noqa: BLE001  the caller must hear of any failure
            outcome = "refused" if isinstance(error, _REFUSALS) else "failed"
            named = "" if isinstance(error, LibraError) else f"{type(error).__name__}: "
            connection.send([call, outcome, f"{named}{error}"])
            return True
        return found is not None
