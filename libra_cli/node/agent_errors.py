"""The error that the agent answers with when it cannot carry out an operation."""

from __future__ import annotations

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["request", "start", "ports", "weights", "disk"]
"""What is at fault: the request, a process, the host's ports or disk, or a weight version."""


class AgentRefused(Exception):
    """The agent did not carry out an operation. ``kind`` selects the controller's exception."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind
