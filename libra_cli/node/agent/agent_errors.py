"""The one error of the host protocol: what was asked cannot be done, and why, for the asker."""

from __future__ import annotations

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["request", "start", "ports", "weights", "disk"]
"""What the controller should blame: its own request, a process, the host or a weight version."""


class AgentRefused(Exception):
    """An operation of the agent was not carried out. ``kind`` chooses the controller's error."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind
