"""What is played on the server of ``tests.openenv.server``, live or from the recording."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters.openenv import OpenEnvEpisode
from libra_cli.envs.protocol import ToolCall, ToolFailed


@asynccontextmanager
async def closed(episode: OpenEnvEpisode) -> AsyncIterator[OpenEnvEpisode]:
    try:
        yield episode
    finally:
        await episode.close()


def names(episode: OpenEnvEpisode) -> list[str]:
    return [tool["function"]["name"] for tool in episode.tools]


async def oracle_buys(url: str) -> None:
    """An MCP environment: the list is bought, and each of two items is worth a half."""
    async with closed(OpenEnvEpisode(url, instructions="Buy what is on the list.")) as episode:
        messages = await episode.reset({"prompt": "Here it is:", "seed": 3}, 0)
        assert messages == [
            {"role": "system", "content": "Buy what is on the list."},
            {"role": "user", "content": 'Here it is:\n\n["eggs", "tea"]'},
        ]
        assert names(episode) == ["add", "look"]
        assert episode.tools[0]["function"]["parameters"]["required"] == ["item"]
        first = await episode.step(ToolCall("add", {"item": "eggs"}))
        assert (first.text, first.reward, first.done) == ("1 items", 0.5, False)
        last = await episode.step(ToolCall("add", {"item": "tea", "count": 2}))
        assert (last.text, last.reward, last.done) == ("2 items", 0.5, True)
        assert await episode.score("") == 0.0


async def idler_buys_nothing(url: str) -> None:
    """Doing nothing gets nothing, and a tool that fails is read by the model."""
    async with closed(OpenEnvEpisode(url)) as episode:
        messages = await episode.reset({"seed": 3}, 0)
        assert messages == [{"role": "user", "content": '["eggs", "tea"]'}]
        for call, words in (
            (ToolCall("add", {"item": "eggs", "count": 0}), "count must be positive"),
            (ToolCall("fly", {}), "Unknown tool: 'fly'"),
        ):
            try:
                await episode.step(call)
            except ToolFailed as failed:
                assert words in str(failed)  # noqa: PT017
            else:
                raise AssertionError(call)
        assert await episode.score("I bought nothing.") == 0.0


async def oracle_guesses(url: str) -> None:
    """An environment with an action of its own has one tool; the last reward counts."""
    async with closed(OpenEnvEpisode(url, rewards="last")) as episode:
        messages = await episode.reset({"seed": 3}, 0)
        assert messages == [{"role": "user", "content": "Guess a number from 0 to 9."}]
        assert names(episode) == ["step"]
        assert list(episode.tools[0]["function"]["parameters"]["properties"]) == ["number"]
        assert (await episode.step(ToolCall("step", {"number": 9}))).text == "lower"
        try:
            await episode.step(ToolCall("step", {"number": "x"}))
        except ToolFailed as failed:
            assert "number: Input should be a valid integer" in str(failed)  # noqa: PT017
        else:
            raise AssertionError("a word is no number")
        assert await episode.score("") == 0.0
        seen = await episode.step(ToolCall("step", {"number": 3}))
        assert (seen.text, seen.done) == ("right", True)
        assert await episode.score("") == 1.0


async def server_breaks(url: str) -> None:
    """What the environment raises breaks the episode."""
    async with closed(OpenEnvEpisode(url)) as episode:
        await episode.reset({}, 0)
        try:
            await episode.step(ToolCall("step", {"number": 50}))
        except EnvironmentBroken as broken:
            assert "EXECUTION_ERROR: the dial broke" in str(broken)  # noqa: PT017
        else:
            raise AssertionError("it did not break")


async def second_is_refused(url: str) -> None:
    """A server with one session refuses the second and says what to change."""
    async with closed(OpenEnvEpisode(url)) as episode:
        try:
            await episode.reset({}, 0)
        except EnvironmentBroken as broken:
            assert "CAPACITY_REACHED" in str(broken)  # noqa: PT017
            assert "SUPPORTS_CONCURRENT_SESSIONS" in broken.hint  # noqa: PT017
        else:
            raise AssertionError("it was let in")


async def oracle_speaks(url: str) -> None:
    """A game in words has no tools: what the model says is the action."""
    async with closed(OpenEnvEpisode(url, text_field="message")) as episode:
        await episode.reset({"word": "xyzzy"}, 0)
        assert names(episode) == []
        reply = await episode.reply("Open!")
        assert reply is not None
        assert ([one["content"] for one in reply.messages], reply.done) == (["No."], False)
        reply = await episode.reply("xyzzy")
        assert reply is not None
        assert (reply.reward, reply.done) == (1.0, True)
        assert await episode.score("xyzzy") == 0.0


PLAYED: Mapping[str, tuple[str, Callable[[str], Awaitable[Any]]]] = {
    "oracle_buys": ("basket", oracle_buys),
    "idler_buys_nothing": ("basket", idler_buys_nothing),
    "oracle_guesses": ("number", oracle_guesses),
    "server_breaks": ("number", server_breaks),
    "oracle_speaks": ("chat", oracle_speaks),
    "second_is_refused": ("single", second_is_refused),
}
"""By name: the kind of the server, and what is played on it."""
