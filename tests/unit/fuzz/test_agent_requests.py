"""Agents send anything to the proxy: an answer or a refusal in words, and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.renderer import Renderer
from tests.agents import fake_machine
from tests.unit.fuzz import nonsense

DEADLINE_S = 20.0
TOOL = {"name": "get", "description": "", "parameters": {"type": "object", "properties": {}}}
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": TOOL}],
    "max_tokens": 9,
    "stream": False,
    "n": 1,
    "temperature": 1.0,
    "stop": ["x"],
    "logprobs": True,
}
MESSAGES = {**CHAT, "tools": [{"name": "get", "input_schema": {}}], "system": "be brief"}
RESPONSES = {"model": "m", "input": [{"role": "user", "content": "hello"}], "stream": False}
BODIES = {
    "chat/completions": CHAT,
    "messages": MESSAGES,
    "messages/count_tokens": MESSAGES,
    "responses": RESPONSES,
    "reward": {"reward": 1.0},
    "models": {},
}
requests = st.lists(
    st.sampled_from(sorted(BODIES)).flatmap(
        lambda path: st.tuples(st.just(path), nonsense.json_like(BODIES[path]))
    ),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=512)
    return Renderer(directory)


async def sent(renderer: Renderer, run_dir: Any, asked: list[tuple[str, bytes]]) -> list[int]:
    """The statuses of the answers to these requests of one agent."""
    statuses: list[int] = []

    async def agent(task: Any, base_url: str, api_key: str, model: str) -> None:
        async with aiohttp.ClientSession() as session:
            for path, body in asked:
                where = base_url.removesuffix("/v1") if path == "reward" else base_url
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(f"{where}/{path}", data=body) as response:
                        await response.read()
                        statuses.append(response.status)

    module = ModuleType("agents_of_fuzz")
    module.agent = agent  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    made = fake_machine({"function": "agents_of_fuzz:agent", "timeout_s": 9.0}, renderer, run_dir)
    try:
        await made.episodes.prepare(print)
        await made.episodes.check(0)
        with nonsense.thrown_at("agents"):
            await asyncio.wait_for(made.play(["hello"] * 9), DEADLINE_S)
    finally:
        await made.episodes.close()
    return statuses


@given(asked=requests)
def test_a_request_is_answered_or_refused(asked, renderer, tmp_path_factory):
    statuses = asyncio.run(sent(renderer, tmp_path_factory.mktemp("run"), asked))
    nonsense.COUNTS["agents' requests"] += len(asked)
    assert all(status < 500 for status in statuses)


@pytest.mark.parametrize("reward", ["1e999", "NaN", "-Infinity", "9" * 400, '"1"', "[]", "true"])
def test_a_reward_is_a_finite_number_or_refused(reward, renderer, tmp_path):
    body = b'{"reward": %s}' % reward.encode()
    statuses = asyncio.run(sent(renderer, tmp_path, [("reward", body)]))
    assert statuses == [200 if reward == "true" else 400]
