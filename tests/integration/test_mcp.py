"""An environment has the tools of a real MCP server, made with the package ``mcp``."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from libra_cli.envs.adapters.mcp import WithMcpTools
from libra_cli.envs.protocol import ToolCall, ToolFailed
from libra_cli.envs.tools import objection
from tests.trainers import free_port

pytestmark = pytest.mark.integration
TASK = {"start": "ab", "hops": 1, "salt": "s"}


@pytest.fixture(scope="module", params=["events", "json", "stdio"])
def place(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    if request.param == "stdio":
        command = [sys.executable, "-m", "tests.mcp_server", "stdio"]
        yield {"command": command, "env": {"KEY": "Bearer {KEY}"}}
        return
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "tests.mcp_server", str(port), request.param])
    try:
        _wait(port, server)
        yield {
            "url": f"http://127.0.0.1:{port}/mcp",
            "headers": {"Authorization": "Bearer {KEY}"},
        }
    finally:
        server.terminate()
        server.wait(10)


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the MCP server did not start")


def environment(place: dict[str, Any]) -> WithMcpTools:
    return WithMcpTools("pointer-chase", {"failure_rate": 0}, [place], secrets={"KEY": "k"})


def test_an_oracle_gets_full_marks_with_its_help_and_doing_nothing_none(
    place: dict[str, Any],
) -> None:
    async def play() -> None:
        oracle, idler = environment(place), environment(place)
        await oracle.reset(TASK, 0)
        await idler.reset(TASK, 0)
        names = [one["function"]["name"] for one in oracle.tools]
        assert names == ["get", "write", "read", "whoami"]
        found = oracle.step(ToolCall("get", {"key": "ab"}))
        assert await oracle.step(ToolCall("write", {"note": found, "times": 2})) == "2 notes"
        assert await oracle.step(ToolCall("read")) == f"{found}, {found}"
        assert await idler.step(ToolCall("read")) == "nothing"
        assert await oracle.step(ToolCall("whoami")) == "Bearer k"
        assert oracle.score(found) == 1.0
        assert idler.score("") == 0.0
        await asyncio.gather(oracle.close(), idler.close())

    asyncio.run(play())


def test_its_schemas_check_calls_and_its_errors_are_read_by_the_model(
    place: dict[str, Any],
) -> None:
    async def play() -> None:
        both = environment(place)
        await both.reset(TASK, 0)
        assert objection(ToolCall("write", {"times": 2}), both.tools) == "write needs note"
        with pytest.raises(ToolFailed, match="times must be positive"):
            await both.step(ToolCall("write", {"note": "a", "times": 0}))
        with pytest.raises(ToolFailed, match="valid string"):
            await both.step(ToolCall("write", {"note": 3}))
        await both.close()

    asyncio.run(play())
