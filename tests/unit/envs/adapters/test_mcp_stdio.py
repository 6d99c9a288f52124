"""An MCP server that a recipe's command starts is spoken to by lines, and ends with its episode."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters import mcp_stdio
from libra_cli.envs.adapters.mcp import WithMcpTools
from libra_cli.envs.adapters.mcp_client import McpSession
from libra_cli.envs.adapters.mcp_stdio import StdioTransport
from libra_cli.envs.protocol import ToolCall

TASK = {"start": "ab", "hops": 1, "salt": "s"}
SERVER = """
import json, os, sys
from pathlib import Path
print("a library says hello", flush=True)
Path(os.environ["PIDS"]).open("a").write(f"{os.getpid()}\\n")
for line in sys.stdin:
    asked = json.loads(line)
    if "method" not in asked:  # what was answered to the ping and to the question of below
        answers = answers + [asked]
        continue
    if "id" not in asked:
        continue
    result = {"protocolVersion": "2025-06-18"}
    if asked["method"] == "tools/list":
        result = {"tools": [{"name": "tell", "inputSchema": {"type": "object"}}]}
    if asked["method"] == "tools/call":
        answers = []
        if asked["params"]["arguments"].get("die"):
            print("out of ideas", file=sys.stderr, flush=True)
            sys.exit(3)
        for number, method in enumerate(("ping", "roots/list")):
            print(json.dumps({"jsonrpc": "2.0", "id": f"q{number}", "method": method}), flush=True)
            answers.append(json.loads(sys.stdin.readline()))
        told = {"answers": answers, "sees": sorted(os.environ)}
        result = {"content": [{"type": "text", "text": json.dumps(told)}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
if os.environ.get("LEAVES"):
    import subprocess
    away = os.environ["LEAVES"] == "away"
    left = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, start_new_session=away)
    Path(os.environ["PIDS"]).open("a").write(f"{left.pid}\\n")
if os.environ.get("STAYS"):
    import time
    time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


def environment(program: list[str], tmp_path: Path, **env: str) -> WithMcpTools:
    told = {"PIDS": str(tmp_path / "pids"), **env}
    servers = [{"command": program, "env": told, "name": "local"}]
    return WithMcpTools("pointer-chase", {}, servers, secrets={"KEY": "k"})


def is_there(pid: str) -> bool:
    return Path("/proc", pid).exists()


def is_over(pid: str) -> bool:
    """Whether a process has ended, though its parent may not have waited for it yet."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_it_answers_what_the_server_asks_and_hides_the_rest_of_the_environment(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")

    async def play() -> str:
        both = environment(program, tmp_path, TOKEN="{KEY}")
        await both.reset(TASK, 0)
        assert [one["function"]["name"] for one in both.tools] == ["get", "local_tell"]
        told = await both.step(ToolCall("local_tell"))
        await both.close()
        return str(told)

    told = asyncio.run(play())
    assert '{"jsonrpc": "2.0", "id": "q0", "result": {}}' in told
    assert '"id": "q1", "error": {"code": -32601' in told
    assert '"TOKEN"' in told
    assert "AWS_SECRET" not in told
    (pid,) = (tmp_path / "pids").read_text().split()
    assert not is_there(pid)


def test_one_that_goes_on_after_its_stdin_is_closed_is_killed(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_stdio, "GRACE_S", 0.05)

    async def play() -> None:
        both = environment(program, tmp_path, STAYS="1")
        await both.reset(TASK, 0)
        (pid,) = (tmp_path / "pids").read_text().split()
        assert os.getpgid(int(pid)) == int(pid)
        await both.close()
        assert not is_there(pid)

    asyncio.run(play())


def test_what_one_leaves_when_it_ends_is_killed(program: list[str], tmp_path: Path) -> None:
    async def play() -> None:
        both = environment(program, tmp_path, LEAVES="1")
        await both.reset(TASK, 0)
        await both.close()

    asyncio.run(play())
    _, left = (tmp_path / "pids").read_text().split()
    until = time.monotonic() + 20.0
    while not is_over(left) and time.monotonic() < until:
        time.sleep(0.01)
    assert is_over(left)


def test_what_has_left_its_group_and_holds_its_pipes_holds_up_nobody(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_stdio, "GRACE_S", 0.05)

    async def play() -> None:
        both = environment(program, tmp_path, LEAVES="away")
        await both.reset(TASK, 0)
        await asyncio.wait_for(both.close(), 20.0)

    try:
        asyncio.run(play())
        gc.collect()  # where pipes are open still, it warns
    finally:
        for pid in (tmp_path / "pids").read_text().split()[1:]:
            os.kill(int(pid), signal.SIGKILL)


def test_one_that_ends_is_told_with_its_last_words(program: list[str], tmp_path: Path) -> None:
    async def play() -> None:
        both = environment(program, tmp_path)
        await both.reset(TASK, 0)
        try:
            await both.step(ToolCall("local_tell", {"die": True}))
        finally:
            await both.close()

    with pytest.raises(
        EnvironmentBroken, match=r"server\.py': it ended; it said last: out of idea"
    ):
        asyncio.run(play())


def test_a_program_that_is_not_there_is_named() -> None:
    session = McpSession(StdioTransport(["no-such-program", "--flag"], {}))
    with pytest.raises(EnvironmentBroken, match="'no-such-program --flag': it cannot be started"):
        asyncio.run(session.open())
    asyncio.run(session.close())
