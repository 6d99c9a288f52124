"""MCP servers' tools are called as the protocol says, and stand beside an environment's own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters import mcp_http
from libra_cli.envs.adapters.mcp import WithMcpTools
from libra_cli.envs.adapters.mcp_client import McpSession
from libra_cli.envs.adapters.mcp_http import HttpTransport
from libra_cli.envs.protocol import (
    Environment,
    Message,
    Reply,
    Task,
    ToolCall,
    ToolFailed,
    function,
)
from libra_cli.runtime.episodes.calls import CallLine
from libra_cli.runtime.episodes.places import EnvironmentFactory, EnvironmentSource
from tests.sandboxes import needs_sandboxes
from tests.unit.envs.adapters.fake_mcp import SCHEMA, FakeMcp, served, text

CHASE = {"failure_rate": 0.0}


class Talkative:
    """An asynchronous environment with optional members."""

    tools = (function("add", "Add.", {}),)

    def __init__(self, secrets: dict[str, str] | None = None, run_directory: str = "") -> None:
        self.secrets = secrets
        self.run_directory = run_directory
        self.closed = False

    def task(self, index: int, seed: int) -> Task:
        return {}

    async def reset(self, task: Task, seed: int) -> list[Message]:
        return [{"role": "user", "content": "Hi."}]

    async def step(self, call: ToolCall) -> str:
        return "added"

    def reply(self, said: str) -> Reply:
        return Reply([{"role": "user", "content": "Go on."}])

    def score(self, answer: str) -> float:
        return 1.0

    async def close(self) -> None:
        self.closed = True


TALKATIVE = f"{__name__}:Talkative"


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(story())  # type: ignore[arg-type]


@asynccontextmanager
async def opened(server: FakeMcp, **headers: str) -> AsyncIterator[McpSession]:
    async with served(server) as (url,):
        session = McpSession(HttpTransport(url, headers))
        try:
            await session.open()
            yield session
        finally:
            await session.close()


def environment(*servers: dict[str, Any], name: str = "pointer-chase", **more: Any) -> WithMcpTools:
    args = CHASE if name == "pointer-chase" else {}
    return WithMcpTools(name, args, servers, **more)


@pytest.mark.parametrize("streams", [False, True])
def test_a_session_is_begun_listed_called_and_ended(streams: bool) -> None:
    server = FakeMcp(
        lambda params: text(f"{params['name']}:{params['arguments']}"), streams=streams
    )

    async def story() -> None:
        async with opened(server, Authorization="Bearer k") as session:
            (tool,) = await session.tools()
            assert tool == {
                "type": "function",
                "function": {"name": "get", "description": "", "parameters": SCHEMA},
            }
            assert await session.call("get", {"key": "ab"}) == "get:{'key': 'ab'}"

    play(story)
    methods = [method for method, _ in server.said]
    began = ["initialize", "notifications/initialized", "tools/list", "tools/call"]
    assert methods == (began if streams else [*began, "DELETE"])
    assert all(headers["Authorization"] == "Bearer k" for _, headers in server.said)
    assert all(headers["MCP-Protocol-Version"] == "2025-06-18" for _, headers in server.said[1:])
    if not streams:
        assert all(headers["Mcp-Session-Id"] == "s1" for _, headers in server.said[1:])


def test_tools_are_listed_page_by_page() -> None:
    async def story() -> None:
        async with opened(FakeMcp(tools=[["a", "b"], ["c"]])) as session:
            assert [one["function"]["name"] for one in await session.tools()] == ["a", "b", "c"]

    play(story)


@pytest.mark.parametrize(
    "answer",
    [text("no such key", isError=True), {"error": {"code": -32602, "message": "no such key"}}],
)
def test_a_tool_that_fails_is_read_by_the_model(answer: dict[str, Any]) -> None:
    async def story() -> None:
        async with opened(FakeMcp(lambda params: answer)) as session:
            with pytest.raises(ToolFailed, match="no such key"):
                await session.call("get", {})

    play(story)


@pytest.mark.parametrize(
    ("result", "read"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///n", "text": "note"}}]},
            "note",
        ),
        (
            {"content": [{"type": "resource_link", "uri": "file:///n", "name": "n.txt"}]},
            "[n.txt file:///n]",
        ),
        (
            {
                "content": [
                    {"type": "text", "text": "The page:"},
                    {"type": "image", "data": "iVBORw0K" * 1000, "mimeType": "image/png"},
                ]
            },
            "The page:\n[image/png, 6,000 bytes, which cannot be shown as text]",
        ),
        ({"content": [], "structuredContent": {"rows": [1]}}, '{"rows": [1]}'),
        ({}, ""),
    ],
)
def test_all_that_a_tool_may_return_is_told_as_text(result: dict[str, Any], read: str) -> None:
    async def story() -> None:
        async with opened(FakeMcp(lambda params: result)) as session:
            assert await session.call("get", {}) == read

    play(story)


def test_a_server_that_fails_breaks_the_environment() -> None:
    server = FakeMcp(lambda params: {"error": {"code": -32603, "message": "out of disk"}})

    async def story() -> None:
        async with opened(server) as session:
            with pytest.raises(EnvironmentBroken, match=r"tools/call: out of disk \(-32603\)"):
                await session.call("get", {})
            server.status = 404
            with pytest.raises(EnvironmentBroken, match="HTTP 404: no such thing"):
                await session.call("get", {})

    play(story)


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_is_too_long_breaks_the_episode_before_it_is_read(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_http, "LARGEST_MESSAGE", 20_000)
    server = FakeMcp(lambda params: text("x" * int(params["arguments"]["size"])), streams=streams)

    async def story() -> None:
        async with opened(server) as session:
            assert len(await session.call("get", {"size": 10_000})) == 10_000
            with pytest.raises(EnvironmentBroken, match="has more than 20,000 bytes"):
                await session.call("get", {"size": 30_000})

    play(story)


def test_a_url_without_a_server_is_told_with_what_to_do() -> None:
    async def story() -> None:
        session = McpSession(HttpTransport("http://127.0.0.1:9/mcp", {}))
        try:
            with pytest.raises(EnvironmentBroken, match="Connect call failed") as error:
                await session.open()
        finally:
            await session.close()
        assert "streamable HTTP" in error.value.hint

    play(story)


def test_it_is_an_environment() -> None:
    assert isinstance(environment({"url": "http://h"}), Environment)


def test_an_environment_keeps_its_own_tools_and_gets_those_of_the_servers() -> None:
    async def story() -> None:
        async with served(FakeMcp(tools=[["look"]]), FakeMcp()) as (first, second):
            both = environment({"url": first}, {"url": second, "name": "web"})
            await both.reset({"start": "ab", "hops": 1, "salt": "s"}, 0)
            names = [one["function"]["name"] for one in both.tools]
            assert names == ["get", "look", "web_get"]
            assert await both.step(ToolCall("web_get", {"key": "q"})) == "v"
            own = both.step(ToolCall("get", {"key": "ab"}))
            assert isinstance(own, str)
            assert both.score(own) == 1.0
            await both.close()

    play(story)


def test_two_tools_of_one_name_are_told_apart_by_a_name_for_the_server() -> None:
    async def story() -> None:
        async with served(FakeMcp()) as (url,):
            both = environment({"url": url})
            with pytest.raises(EnvironmentBroken, match="two tools are called 'get'") as error:
                await both.reset({"start": "ab", "hops": 1, "salt": "s"}, 0)
            assert "name: NAME" in error.value.hint
            await both.close()

    play(story)


def test_what_the_environment_may_have_besides_stays_there() -> None:
    async def story() -> None:
        async with served(FakeMcp()) as (url,):
            both = environment({"url": url}, name=TALKATIVE)
            assert await both.reset({}, 0) == [{"role": "user", "content": "Hi."}]
            assert await both.step(ToolCall("add")) == "added"
            assert both.reply("Well.").messages[0]["content"] == "Go on."
            await both.close()
            assert both.closed

    play(story)
    assert not hasattr(environment(), "reply")


class Stuck(Talkative):
    """Does not end when it is closed."""

    closing, may_end = threading.Event(), threading.Event()

    def close(self) -> None:  # type: ignore[override]
        self.closing.set()
        self.may_end.wait()


def test_an_environment_that_cannot_be_closed_keeps_no_process_from_ending() -> None:
    async def story() -> None:
        closing = asyncio.create_task(environment(name=f"{__name__}:Stuck").close())
        assert await asyncio.to_thread(Stuck.closing.wait, 10)
        assert not closing.done()
        (closer,) = (one for one in threading.enumerate() if one.name == "libra-mcp-close")
        assert closer.daemon
        closing.cancel()
        Stuck.may_end.set()

    play(story)


def test_each_episode_has_a_session_of_its_own() -> None:
    server = FakeMcp()

    async def story() -> None:
        async with served(server) as (url,):
            for _ in range(2):
                both = environment({"url": url, "name": "m"})
                await both.reset({"start": "ab", "hops": 1, "salt": "s"}, 0)
                await both.close()

    play(story)
    ended = [headers["Mcp-Session-Id"] for method, headers in server.said if method == "DELETE"]
    assert len(set(ended)) == 2


def test_a_header_has_a_secret_and_the_environment_gets_secrets_only_if_it_takes_them() -> None:
    server = FakeMcp()

    async def story() -> None:
        async with served(server) as (url,):
            one = {"url": url, "name": "m", "headers": {"Authorization": "Bearer {KEY}"}}
            chase = environment(one, secrets={"KEY": "s3"})
            talk = environment(one, name=TALKATIVE, secrets={"KEY": "s3"}, run_directory="/run")
            for both in (chase, talk):
                await both.reset({"start": "ab", "hops": 1, "salt": "s"}, 0)
                await both.close()
            assert talk.secrets == {"KEY": "s3"}
            assert talk.run_directory == "/run"

    play(story)
    assert all(headers["Authorization"] == "Bearer s3" for _, headers in server.said)


def test_a_secret_that_there_is_not_is_told() -> None:
    server = {"url": "http://h/mcp", "headers": {"Authorization": "Bearer {KEY}"}}
    with pytest.raises(EnvironmentBroken, match=r"names KEY, which is not in environment\.secrets"):
        environment(server)


def test_the_recipe_names_the_servers() -> None:
    async def story() -> None:
        async with served(FakeMcp(tools=[["look"]]), FakeMcp()) as (first, second):
            spec = EnvironmentSpec.model_validate(
                {"args": CHASE, "mcp": [first, {"url": second, "name": "web"}]}
            )
            source = EnvironmentSource(spec, "pointer-chase")
            episode = await source.begin(CallLine())
            opening = await episode.reset(None, 0, 1, 1)
            names = [one["function"]["name"] for one in opening.tools]
            assert names == ["get", "look", "web_get"]
            assert (await episode.step(ToolCall("web_get", {"key": "q"}))).text == "v"
            assert (await episode.score("", opening.messages)).reward == 0.0
            episode.close(CallLine())
            await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
            await source.close()

    play(story)


@pytest.mark.parametrize("mcp", ["http://h/mcp", {"url": "http://h/mcp"}, ["http://h/mcp"]])
def test_one_server_may_stand_alone(mcp: Any) -> None:
    spec = EnvironmentSpec.model_validate({"mcp": mcp})
    assert [(one.url, one.name) for one in spec.mcp] == [("http://h/mcp", "")]


@needs_sandboxes
def test_an_environment_with_sandboxes_has_the_tools_of_servers_too(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"instruction": "Who?", "check": "grep -x 7 who"}) + "\n")

    async def story() -> None:
        async with served(FakeMcp()) as (url,):
            spec = EnvironmentSpec.model_validate(
                {"name": "shell", "tasks": str(tasks), "mcp": url, "sandbox": {"user": 7}}
            )
            both = EnvironmentFactory(spec, None).make()
            try:
                await cast("Any", both.reset(json.loads(tasks.read_text()), 0))
                assert {"bash", "get"} <= {one["function"]["name"] for one in both.tools}
                await asyncio.to_thread(both.step, ToolCall("bash", {"command": "id -u > who"}))
                assert await asyncio.to_thread(both.score, "") == 1.0
            finally:
                await cast("Any", both).close()

    play(story)
