"""Environments and their tasks do anything: the episode goes on, or it is an EnvironmentBroken."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from math import isfinite
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.core.types import GroupId, TrajectoryId
from libra_cli.envs.protocol import Finished, Reply, StepResult, ToolCall, ToolFailed, function
from libra_cli.envs.session import Opening
from libra_cli.envs.workers import wire
from libra_cli.envs.workers.wire import Frames, Kind
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.player import Episodes, TurnResult
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.episodes.workers import ForkServerConnection, WorkerEnvironment
from tests.unit.fuzz import nonsense

ONE = TrajectoryId(GroupId(0), 0)
TOOL = function("get", "", {"key": {"type": "string"}})
RESET = [{"role": "user", "content": "what is 1+1?"}]


class Anything:
    """Returns what it is told to, or raises it."""

    told: dict[str, Any]

    @property
    def tools(self) -> Any:
        return self._said("tools")

    def task(self, index: int, seed: int) -> Any:
        return self._said("task")

    def reset(self, task: Any, seed: int) -> Any:
        return self._said("reset")

    def step(self, call: Any) -> Any:
        return self._said("step")

    def reply(self, text: str) -> Any:
        return self._said("reply")

    def score(self, answer: str) -> Any:
        return self._said("score")

    def metrics(self) -> Any:
        return self._said("metrics")

    def _said(self, member: str) -> Any:
        said = Anything.told[member]
        if isinstance(said, BaseException):
            raise said
        return said


@pytest.fixture(scope="module", autouse=True)
def module():
    made = ModuleType("anything_environment")
    made.Anything = Anything  # type: ignore[attr-defined]
    sys.modules[made.__name__] = made
    yield
    del sys.modules[made.__name__]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=256)
    return Renderer(directory)


raised = st.builds(
    lambda kind, text: kind(text),
    st.sampled_from([ValueError, ToolFailed, Finished, KeyError, SystemExit, MemoryError]),
    nonsense.texts,
)
results = st.builds(StepResult, nonsense.texts, nonsense.numbers, st.booleans())
replies = st.builds(Reply, nonsense.changed(RESET), nonsense.numbers, st.booleans())
anything = st.one_of(nonsense.values, raised, results, replies, st.binary(max_size=9))


def near(valid: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(valid), st.just(valid), nonsense.changed(valid), anything)


SAID = {
    "task": {"text": "1+1"},
    "tools": [TOOL],
    "reset": RESET,
    "step": "two",
    "reply": None,
    "score": 1.0,
    "metrics": {"right": 1.0},
}
CALL = '<tool_call>\n{"name": "get", "arguments": {"key": "a"}}\n</tool_call>'


async def played(renderer: Renderer, said: dict[str, Any], turns: list[str]) -> TurnResult | None:
    Anything.told = said
    spec = EnvironmentSpec(name="anything_environment:Anything", tool_timeout_s=5.0)
    episodes = Episodes([spec], [""], renderer)
    result: TurnResult | None = None
    try:
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        for text in turns:
            tokens = [*renderer.encode(text), renderer.end_of_turn]
            result = await episodes.advance(ONE, tokens, "stop")
            if result.done:
                break
        return result
    finally:
        await episodes.close()


@given(
    said=st.fixed_dictionaries({name: near(valid) for name, valid in SAID.items()}),
    turns=st.lists(st.sampled_from([CALL, "two"]) | nonsense.texts, max_size=3),
)
def test_an_episode_goes_on_or_is_broken(said, turns, renderer):
    with nonsense.thrown_at("environments"):
        result = asyncio.run(played(renderer, said, turns))
        if result is not None and result.done:
            assert result.reward is not None
            assert isfinite(result.reward)


@pytest.mark.parametrize("half", ["\ud83d 1+1", "\udcff"])
@pytest.mark.parametrize("where", ["reset", "tools", "step", "task"])
def test_half_a_character_ends_no_run(half, where, renderer):
    worded = {
        "reset": [{"role": "user", "content": half, "name": "x"}],
        "tools": [function("get", half, {"key": {"type": "string", "description": half}})],
        "step": half,
        "task": {"text": half},
    }
    result = asyncio.run(played(renderer, {**SAID, where: worded[where]}, [CALL, "two"]))
    assert result is not None
    assert result.done


def test_an_observation_of_50_megabytes_is_shortened(renderer):
    said = {**SAID, "step": "x" * 50_000_000}
    result = asyncio.run(played(renderer, said, [CALL]))
    assert result is not None
    assert len(result.observation_ids) < 200_000
    assert result.returns[0].characters == 50_000_000


ANSWERS = {
    "reset": {"messages": RESET, "tools": [TOOL], "replies": False, "task": {}},
    "step": {
        "text": "two",
        "size": 3,
        "failed": False,
        "reward": 0.0,
        "done": False,
        "seconds": 0.1,
        "tools": None,
    },
    "reply": {"messages": [], "reward": 0.0, "done": True, "tools": None},
    "score": {"reward": 1.0, "metrics": {}},
}


@given(data=st.data(), member=st.sampled_from(sorted(ANSWERS)))
def test_whatever_a_worker_answers_it_is_taken_or_broken(data, member):
    answer = data.draw(
        st.one_of(
            nonsense.changed(["returned", ANSWERS[member]]),
            nonsense.changed(ANSWERS[member]).map(lambda fields: ["returned", fields]),
        )
    )

    class Said(ForkServerConnection):
        def __init__(self) -> None:
            self._name, self._fates = "anything", {}

        async def _ask(self, kind: Kind, episode: int, body: bytes) -> bytes:
            return nonsense.as_msgpack(answer)

    async def main() -> Any:
        environment = WorkerEnvironment(Said(), 1, lambda: None)
        match member:
            case "reset":
                return await environment.reset(None, 0, 0, 0)
            case "step":
                return await environment.step(ToolCall("get", {}))
            case "reply":
                return await environment.reply("two")
            case _:
                return await environment.score("two", [])

    with nonsense.thrown_at("environment workers"):
        taken = asyncio.run(main())
        if isinstance(taken, Opening):
            assert all(isinstance(one["content"], str) for one in taken.messages)


@given(data=nonsense.broken(nonsense.values.map(nonsense.as_msgpack)))
def test_whatever_bytes_a_worker_sends_are_frames_or_a_value_error(data):
    with nonsense.thrown_at("worker frames"):
        for whole in (data, wire.frame(Kind.CALL, 1, data)):
            with contextlib.suppress(ValueError):
                for _, _, body in Frames().feed(whole):
                    wire.unpack(body)
