"""What is told of a process that has stalled, whatever its host answers."""

from __future__ import annotations

import asyncio

import pytest

from libra_cli.config.errors import HostLost
from libra_cli.runtime.supervision import stalls
from libra_cli.runtime.supervision.stalls import stall_reason


class FakeHost:
    def __init__(self, said: str | Exception | None) -> None:
        self.said = said

    async def tail(self, process: str, lines: int = 20) -> str:
        if self.said is None:
            await asyncio.Event().wait()
        if isinstance(self.said, Exception):
            raise self.said
        return str(self.said)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("one\n\x1b[2Jtwo\n", "one | \\x1b[2Jtwo"),
        ("", "nothing"),
        ("x" * 1000, "x" * stalls.LINE_CHARACTERS),
        (HostLost("away"), "cannot be read: HostLost: away"),
        (KeyError("tail"), "cannot be read: KeyError: 'tail'"),
        (None, "cannot be read: TimeoutError"),
    ],
)
def test_the_host_the_process_its_last_words_and_the_next_command_are_named(
    monkeypatch, said: str | Exception | None, told: str
) -> None:
    monkeypatch.setattr(stalls, "TAIL_S", 0.05)
    reason = asyncio.run(stall_reason(FakeHost(said), "gpu-01", "server-0", "asleep", 51.4))
    assert reason == (
        "server-0 on gpu-01 made no progress for 51 s asleep; the end of its log: "
        f"{told}; next: libra logs gpu-01 server-0"
    )
