"""Keys, routes and waiting: what clients find at the address that they are given."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import aiohttp
import pytest
from aiohttp import web

from libra_cli.config.errors import AgentFailed
from libra_cli.runtime.agents import server
from libra_cli.runtime.store.event_codec import pack
from tests.agents import DEADLINE_S, Chat, Refused, post
from tests.asked_model import AskedModel

USER = [{"role": "user", "content": "hello"}]


def chat_body(**extra):
    return {"model": "m", "messages": USER, **extra}


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "X-Session-ID"])
def test_a_key_may_stand_in_the_path_or_where_clients_put_one(play, header):
    async def agent(task, base_url, api_key, model):
        bare = base_url.replace(f"/t/{api_key}", "")
        value = f"Bearer {api_key}" if header == "Authorization" else api_key
        await post(f"{bare}/chat/completions", chat_body(), **{header: value})
        await post(f"{base_url}/chat/completions", chat_body())

    made, _ = play(agent, "a", "b")
    assert made.trajectory.turns == 2


def test_a_made_up_key_beside_the_one_that_counts_does_no_harm(play):
    async def agent(task, base_url, api_key, model):
        bare = base_url.replace(f"/t/{api_key}", "")
        headers = {"Authorization": "Bearer EMPTY", "X-Session-ID": api_key}
        await post(f"{bare}/chat/completions", chat_body(), **headers)

    made, _ = play(agent, "a")
    assert made.trajectory.turns == 1


def test_an_unknown_key_is_401_and_that_of_a_trajectory_that_has_ended_409(play):
    kept: list[str] = []

    async def agent(task, base_url, api_key, model):
        await post(f"{base_url}/chat/completions", chat_body())
        for url in kept:
            with pytest.raises(Refused, match="has ended") as ended:
                await post(f"{url}/chat/completions", chat_body())
            assert ended.value.status == 409
            assert ended.value.headers["x-should-retry"] == "false"
        with pytest.raises(Refused, match="no trajectory has this key") as unknown:
            await post(f"{base_url[:-5]}/v1/messages", chat_body())
        assert unknown.value.status == 401
        kept.append(base_url)

    async def twice(made):
        await made.play(["a"], member=1)
        return await made.play(["b"], member=2)

    play(agent, scene=twice)
    assert len(kept) == 2


def test_the_model_and_the_server_can_be_looked_at(play):
    async def agent(task, base_url, api_key, model):
        await post(f"{base_url}/chat/completions", chat_body())
        root = base_url.removesuffix("/v1")
        async with aiohttp.ClientSession() as session:
            async with session.head(f"{root}/") as response:
                assert response.status == 200
            async with session.get(f"{base_url}/models") as response:
                (found,) = (await response.json())["data"]
                assert (found["id"], found["max_model_len"]) == (model, 512)
            async with session.get(f"{base_url}/chat/completions") as response:
                assert response.status == 405
            async with session.post(f"{base_url}/embeddings", json={}) as response:
                assert response.status == 404
            async with session.post(f"{base_url}/messages", data=b"{") as response:
                assert response.status == 400
                assert "not JSON" in (await response.json())["error"]["message"]

    play(agent, "a")


def test_the_same_conversation_goes_on_in_every_dialect(play):
    async def agent(task, base_url, api_key, model):
        talk = Chat(base_url, api_key, [*USER])
        await talk.ask()
        talk.messages.append({"role": "user", "content": "more"})
        body = {"model": "m", "max_tokens": 9, "messages": talk.messages}
        answer = await post(f"{base_url}/messages", body, **{"x-api-key": api_key})
        assert answer["content"][0]["text"] == "two"
        talk.messages.append({"role": "assistant", "content": "two"})
        talk.messages.append({"role": "user", "content": "and more"})
        body = {"model": "m", "input": talk.messages}
        answer = await post(f"{base_url}/responses", body, key=api_key)
        assert answer["output"][0]["content"][0]["text"] == "three"

    made, _ = play(agent, "one", "two", "three")
    assert made.trajectory.others == {}


def test_the_tokens_of_a_prompt_are_counted_without_a_turn(play):
    async def agent(task, base_url, api_key, model):
        counted = await post(f"{base_url}/messages/count_tokens", chat_body())
        answer = await post(f"{base_url}/messages", chat_body(max_tokens=9))
        assert counted == {"input_tokens": answer["usage"]["input_tokens"]}

    made, _ = play(agent, "a")
    assert made.trajectory.turns == 1


def test_the_tokens_of_a_prompt_that_goes_on_are_counted_as_they_are_kept(play):
    """The turn's own tokens, thinking too, stay in the prompt; written again it has fewer."""

    async def agent(task, base_url, api_key, model):
        talk = [*USER]
        first = await post(f"{base_url}/messages", chat_body(max_tokens=9))
        talk.append({"role": "assistant", "content": first["content"]})
        talk.append({"role": "user", "content": "more"})
        body = chat_body(messages=talk)
        counted = await post(f"{base_url}/messages/count_tokens", body)
        answer = await post(f"{base_url}/messages", {**body, "max_tokens": 9})
        assert counted == {"input_tokens": answer["usage"]["input_tokens"]}

    made, _ = play(agent, "<think>a long thought</think>\n\nyes  ", "b")
    assert made.trajectory.turns == 2


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_waits_long_is_kept_alive_and_answered(play, monkeypatch, stream):
    monkeypatch.setattr(server, "QUIET_S", 0.05)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)
    told: list[str] = []

    async def agent(task, base_url, api_key, model):
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{base_url}/chat/completions", json=chat_body(stream=stream)) as answer,
        ):
            told.append(await answer.text())

    play(agent, "late", turn_s=0.3)
    assert "late" in told[0]
    if stream:
        assert told[0].startswith(": keep-alive")
        assert told[0].rstrip().endswith("data: [DONE]")
    else:
        assert told[0].startswith("  ")
        assert json.loads(told[0])["choices"][0]["message"]["content"] == "late"


def test_a_limit_that_comes_late_is_in_the_body(play, monkeypatch):
    monkeypatch.setattr(server, "QUIET_S", 0.0)
    told: list[str] = []

    async def agent(task, base_url, api_key, model):
        talk = Chat(base_url, api_key, [*USER])
        await talk.ask()
        talk.messages.append({"role": "user", "content": "more"})
        body = chat_body(messages=talk.messages, stream=True)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{base_url}/chat/completions", json=body) as answer,
        ):
            told.append(await answer.text())

    play(agent, "a", changes={"rollout": {"max_turns": 1}})
    assert "rollout.max_turns" in told[0]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_body_that_is_too_large_is_refused_in_words_like_a_prompt_that_is(
    play, monkeypatch, path
):
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 10_000)

    async def agent(task, base_url, api_key, model):
        await post(f"{base_url}/chat/completions", chat_body())
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{base_url}/{path}", json=chat_body(metadata="x" * 20_000)) as answer,
        ):
            assert answer.status == 413
            assert "prompt is too long" in (await answer.json())["error"]["message"]
        raise KeyError("choices")

    _, result = play(agent, "a")
    assert (result.done, result.reward) == (True, 0.0)


@pytest.mark.parametrize("quiet_s", [0.05, 15.0])
def test_an_agent_that_fails_tells_what_it_was_refused_whenever_that_was(
    play, monkeypatch, quiet_s
):
    monkeypatch.setattr(server, "QUIET_S", quiet_s)

    async def agent(task, base_url, api_key, model):
        first = asyncio.create_task(post(f"{base_url}/chat/completions", chat_body()))
        await asyncio.sleep(0.1)  # the next one waits in line behind it
        body = {"input": "more", "previous_response_id": "resp_none"}
        with contextlib.suppress(Refused):
            await post(f"{base_url}/responses", body)
        await first
        raise KeyError("output")

    with pytest.raises(AgentFailed, match=r"KeyError.*no response 'none' is known"):
        play(agent, "a", turn_s=0.4)


def test_sampling_of_the_agent_is_not_used_and_the_user_is_told_once(play):
    async def agent(task, base_url, api_key, model):
        for _ in range(3):
            await post(f"{base_url}/chat/completions", chat_body(temperature=0.0))

    made, _ = play(agent, "a", "b", "c")
    assert sum("temperature" in note for note in made.notes) == 1


def test_an_agent_says_how_many_tokens_a_turn_may_have(play):
    async def agent(task, base_url, api_key, model):
        await post(f"{base_url}/chat/completions", chat_body(max_tokens=3))
        await post(f"{base_url}/messages", chat_body(max_tokens=9))
        await post(f"{base_url}/chat/completions", chat_body())

    made, _ = play(agent, "a", "b", "c")
    assert made.limits == [3, 9, None]
    assert not made.notes


def test_a_limit_of_more_tokens_than_any_turn_has_can_be_kept_among_the_events(play):
    async def agent(task, base_url, api_key, model):
        await post(f"{base_url}/chat/completions", chat_body(max_tokens=2**64))

    made, _ = play(agent, "a")
    assert made.limits == [512]
    assert pack(made.limits)


class _BusyModel(AskedModel):
    """A frozen model that answers after 5 s, and tells who has left before that."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.left = threading.Event(), threading.Event()

    async def _answer(self, http):
        self.asked.set()
        for _ in range(500):
            if http.transport is None:
                self.left.set()
                break
            await asyncio.sleep(0.01)
        return web.Response()


def test_a_frozen_model_works_no_longer_for_an_agent_that_is_gone(play):
    busy = _BusyModel()

    async def agent(task, base_url, api_key, model):
        await post(f"{base_url}/chat/completions", chat_body())
        url = f"{base_url.removesuffix('/v1')}/models/judge/v1/chat/completions"
        judged = asyncio.create_task(post(url, chat_body()))
        assert await asyncio.to_thread(busy.asked.wait, DEADLINE_S)
        judged.cancel()
        return float(await asyncio.to_thread(busy.left.wait, 5.0))

    served = {
        "nodes": [{"host": "a", "slots": 3, "pool": ["rollout", "train", "models"]}],
        "models": [{"name": "judge", "path": "/judge"}],
    }
    _, result = play(agent, "a", model=busy, served="judge", changes=served)
    assert result.reward == 1.0


def test_a_turn_is_kept_for_a_client_that_is_gone_and_comes_back(play):
    said = []

    async def agent(task, base_url, api_key, model):
        url = f"{base_url}/chat/completions"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(url, chat_body()), 0.2)
        said.append(await post(url, chat_body(), **{"x-stainless-retry-count": "1"}))

    made, _ = play(agent, "a", turn_s=0.5)
    assert said[0]["choices"][0]["message"]["content"] == "a"
    assert made.trajectory.turns == 1


def test_a_reward_may_be_posted(play):
    async def agent(task, base_url, api_key, model):
        await post(f"{base_url}/chat/completions", chat_body())
        root = base_url.removesuffix("/v1")
        with pytest.raises(Refused, match="must be a number"):
            await post(f"{root}/reward", {"reward": "good"})
        await post(f"{root}/reward", {"reward": 0.5})

    _, result = play(agent, "a")
    assert result.reward == 0.5


def test_an_agent_elsewhere_fetches_a_task_plays_it_and_ends_it_with_its_reward(play, tmp_path):
    async def elsewhere():
        told = json.loads((tmp_path / "agents.json").read_text())
        url = f"{told['url']}/tasks"
        async with aiohttp.ClientSession() as session, session.post(url) as unnamed:
            assert unnamed.status == 401
        for key in ("", "wrong", told["token"][:-1], told["token"] + "x"):
            with pytest.raises(Refused, match="401"):
                await post(url, None, key=key)
        job = await post(f"{told['url']}/tasks?wait_s=5", None, key=told["token"])
        talk = Chat(job["base_url"], job["api_key"], job["task"]["messages"])
        await talk.ask()
        await post(f"{job['root_url']}/reward", {"reward": 0.75})

    async def scene(made):
        async with asyncio.TaskGroup() as group:
            group.create_task(elsewhere())
            return await made.play(["a"])

    _, result = play(None, scene=scene, external=True)
    assert result.reward == 0.75
    assert (tmp_path / "agents.json").stat().st_mode & 0o077 == 0


def test_who_stopped_waiting_for_a_task_does_not_get_it(play, tmp_path):
    async def elsewhere(told):
        job = await post(f"{told['url']}/tasks?wait_s=5", None, key=told["token"])
        await Chat(job["base_url"], job["api_key"], job["task"]["messages"]).ask()
        await post(f"{job['root_url']}/reward", {"reward": 0.75})

    async def scene(made):
        told = json.loads((tmp_path / "agents.json").read_text())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await post(f"{told['url']}/tasks?wait_s=60", None, key=told["token"])
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(made.play(["a"]))
            await asyncio.sleep(0.1)
            group.create_task(elsewhere(told))
            return await playing

    _, result = play(None, scene=scene, external=True)
    assert result.reward == 0.75


def test_half_an_emoji_does_no_harm(play):
    async def agent(task, base_url, api_key, model):
        whole, half = "\N{GRINNING FACE}", "\ud83d"
        talk = Chat(base_url, api_key, [{"role": "user", "content": f"{whole} and {half}"}])
        await talk.ask()
        talk.messages.append({"role": "user", "content": "more"})
        await talk.ask()

    made, _ = play(agent, "a", "b")
    assert made.trajectory.others == {}
    assert "\N{GRINNING FACE} and ?" in made.texts[0]
