"""OpenEnv's servers are played as recorded from the package's own (``tests.openenv.record``)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pytest
from aiohttp import web

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters.openenv import OpenEnvEpisode
from libra_cli.envs.protocol import Environment, StepResult, ToolCall, ToolFailed
from libra_cli.runtime.episodes.calls import CallLine
from libra_cli.runtime.episodes.places import EnvironmentSource
from tests.openenv.episodes import PLAYED, closed
from tests.openenv.exchange import Replay, served

EXCHANGES = json.loads(
    Path("tests/fixtures/openenv/exchanges.json").read_text(encoding="utf-8"),
)


def test_it_is_an_environment() -> None:
    assert isinstance(OpenEnvEpisode("http://127.0.0.1:1"), Environment)


@pytest.mark.parametrize("name", PLAYED)
def test_an_episode_is_played_as_on_the_real_server(name: str) -> None:
    async def play() -> None:
        async with served(replay) as url:
            await PLAYED[name][1](url)

    replay = Replay(**EXCHANGES[name])
    asyncio.run(play())
    assert not replay.surprises


def test_it_is_played_by_its_name_in_a_recipe() -> None:
    async def play() -> None:
        async with served(Replay(**EXCHANGES["oracle_speaks"])) as url:
            args = {"url": url, "text_field": "message"}
            spec = EnvironmentSpec.model_validate({"name": "openenv", "args": args})
            source = EnvironmentSource(spec, "openenv")
            episode = await source.begin(CallLine())
            opening = await episode.reset({"word": "xyzzy"}, 0, 0, 0)
            assert opening.replies
            assert not (await episode.reply("Open!")).done
            last = await episode.reply("xyzzy")
            assert (last.reward, last.done) == (1.0, True)
            assert (await episode.score("xyzzy", [])).reward == 0.0
            episode.close(CallLine())
            await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
            await source.close()

    asyncio.run(play())


def test_the_members_of_a_group_send_the_same_seed() -> None:
    seeds = [OpenEnvEpisode("http://h").task(index, 7)["seed"] for index in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]


class Leaver:
    """Ends the connection instead of answering a step."""

    schema: Any = MappingProxyType({"action": {"properties": {"number": {"type": "integer"}}}})

    async def get_schema(self, request: web.Request) -> web.Response:
        return web.json_response(dict(self.schema))

    async def talk(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        seen: dict[str, Any] = {"observation": {}, "reward": None, "done": False}
        await socket.send_json({"type": "observation", "data": seen})
        await socket.receive()
        return socket


def test_a_server_that_closes_the_connection_breaks_the_episode_each_time() -> None:
    async def play() -> None:
        async with served(Leaver()) as url, closed(OpenEnvEpisode(url)) as episode:  # type: ignore[arg-type]
            await episode.reset({}, 0)
            for _ in range(2):
                with pytest.raises(EnvironmentBroken, match="closed the connection"):
                    await episode.step(ToolCall("step", {"number": 3}))

    asyncio.run(play())


class Picky(Leaver):
    """Finds every action malformed."""

    async def talk(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        seen: dict[str, Any] = {"observation": {}, "reward": None, "done": False}
        await socket.send_json({"type": "observation", "data": seen})
        while (await socket.receive()).type == web.WSMsgType.TEXT:
            error = {"code": "VALIDATION_ERROR", "message": "a word is missing", "errors": []}
            await socket.send_json({"type": "error", "data": error})
        return socket


def test_words_that_the_server_finds_malformed_are_an_error_that_the_model_reads() -> None:
    async def play() -> None:
        async with (
            served(Picky()) as url,  # type: ignore[arg-type]
            closed(OpenEnvEpisode(url, text_field="message")) as episode,
        ):
            await episode.reset({}, 0)
            reply = await episode.reply("")
            assert reply is not None
            assert reply.messages == [{"role": "user", "content": "a word is missing"}]
            assert not reply.done
            assert await episode.score("") == 0.0

    asyncio.run(play())


class Failing(Leaver):
    """Has a tool that fails, with a reward or the end of the episode."""

    schema: Any = MappingProxyType({"action": {}})

    def __init__(self, observation: dict[str, Any], reward: float | None, done: bool) -> None:
        self._answers = [
            {"observation": {}, "reward": None, "done": False},
            {"observation": {"tools": []}, "reward": None, "done": False},
            {"observation": observation, "reward": reward, "done": done},
        ]

    async def talk(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for answer in self._answers:
            await socket.receive()
            await socket.send_json({"type": "observation", "data": answer})
        return socket


def stepped(server: Failing, rewards: Literal["sum", "last"] = "sum") -> StepResult:
    """Return what the tool that fails comes to."""

    async def play() -> StepResult:
        async with (
            served(server) as url,  # type: ignore[arg-type]
            closed(OpenEnvEpisode(url, rewards)) as episode,
        ):
            await episode.reset({}, 0)
            return await episode.step(ToolCall("dig", {}))

    return asyncio.run(play())


REFUSED = {"tool_name": "dig", "error": {"error_type": "execution_error", "message": "too deep"}}
ANSWERED = {
    "tool_name": "dig",
    "result": {"content": [{"type": "text", "text": "too deep"}], "is_error": True},
}


@pytest.mark.parametrize("observation", [REFUSED, ANSWERED])
def test_the_reward_and_the_end_of_a_tool_that_failed_count(observation: dict[str, Any]) -> None:
    assert stepped(Failing(observation, -0.1, done=True)) == StepResult("too deep", -0.1, True)
    assert stepped(Failing(observation, -0.1, done=False)) == StepResult("too deep", -0.1)
    assert stepped(Failing(observation, 0.5, done=True), "last") == StepResult(
        "too deep", done=True
    )
    with pytest.raises(ToolFailed, match="too deep"):
        stepped(Failing(observation, 0.0, done=False))


def test_a_server_that_is_not_there_is_told_with_what_to_type() -> None:
    async def play() -> None:
        async with closed(OpenEnvEpisode("http://127.0.0.1:9/")) as episode:
            await episode.reset({}, 0)

    with pytest.raises(EnvironmentBroken, match="Connect call failed") as error:
        asyncio.run(play())
    assert error.value.hint == "curl http://127.0.0.1:9/health"


def test_rewards_are_summed_or_the_last() -> None:
    with pytest.raises(EnvironmentBroken, match="'sum' or 'last'"):
        OpenEnvEpisode("http://h", rewards="mean")  # type: ignore[arg-type]
