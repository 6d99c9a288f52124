"""The orders of a controller that wait for the thread that trains, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_cli.config.errors import LibraError, TrainerError
from libra_cli.node.command_queue import BaseCommandQueue, Later
from libra_cli.node.control import Answer

_BASIC = ("check", "ready", "stop")


@dataclass(slots=True)
class TenantOrder:
    """An order, and its answer or its error once it was carried out."""

    operation: str
    order: Mapping[str, Any]
    answer: Answer | None = None
    error: LibraError | None = None

    def outcome(self) -> Answer | None:
        """Return the answer, None while there is none; raises LibraError if it failed."""
        if self.error is not None:
            raise self.error
        return self.answer


@dataclass(kw_only=True)
class TenantQueue(BaseCommandQueue[TenantOrder]):
    """The orders of tenants, in the order in which they came."""

    name: str = field(default="trainer of tenants")

    def ready(self) -> None:
        """Say that orders are carried out from now on."""
        with self._changed:
            self.state = "ready"
            self._tell()

    def take(self, operation: str, order: Mapping[str, Any]) -> Later:
        """Queue an order, or answer one that every process knows; see the class."""
        if operation in _BASIC:
            return super().take(operation, order)
        with self._changed:
            self._check_available(self.name)
            asked = TenantOrder(operation, order)
            self._add(asked)
        return self._later(asked.outcome)

    def carry_out(
        self, asked: TenantOrder, perform: Callable[[str, Mapping[str, Any]], Answer]
    ) -> None:
        """Have an order performed and tell its answer. An order that is wrong fails alone."""
        error, answer = None, None
        try:
            answer = perform(asked.operation, asked.order)
        except LibraError as wrong:
            error = wrong
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as wrong:
            error = TrainerError(f"{asked.operation}: {type(wrong).__name__}: {wrong}")
        with self._changed:
            asked.answer, asked.error = answer, error
            self._tell()
