"""The agent's end of its host's member of process groups, with a process of the test's own."""

from __future__ import annotations

import io
import json
import subprocess
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.weights.fabric import FabricMember

DEADLINE_S = 5.0


class FakeProcess:
    """A member that runs, and answers when the test says so."""

    def __init__(self) -> None:
        self.stdin = io.StringIO()
        self.is_killed = False

    def poll(self) -> int | None:
        return -9 if self.is_killed else None

    def kill(self) -> None:
        self.is_killed = True

    def wait(self) -> int:
        return -9


def test_an_order_that_comes_again_does_not_end_the_transfer_it_has_begun() -> None:
    """A controller sends an order again whose connection was lost before the answer came."""
    member, process = FabricMember(), FakeProcess()
    member._process, member._group = cast("subprocess.Popen[str]", process), "g"
    failed: list[AgentRefused] = []

    def send() -> None:
        try:
            member.send("g", ["a", "b"], Path("/versions/v000001-e0"), DEADLINE_S)
        except AgentRefused as error:
            failed.append(error)

    first = threading.Thread(target=send)
    first.start()
    give_up = time.monotonic() + DEADLINE_S
    while not process.stdin.getvalue() and time.monotonic() < give_up:
        time.sleep(0.01)
    with pytest.raises(AgentRefused, match="another version is on its way"):
        member.send("g", ["a", "b"], Path("/versions/v000001-e0"), DEADLINE_S)
    assert not process.is_killed
    member._lines.put(json.dumps({}) + "\n")
    first.join(DEADLINE_S)
    assert not failed
    assert process.stdin.getvalue().count("\n") == 1
