"""Trajectories that agents of tests play through the real server."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import pytest

from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.renderer import Renderer
from tests.agents import DEADLINE_S, fake_machine
from tests.asked_model import AskedModel


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=512)
    return Renderer(directory)


@pytest.fixture
def play(renderer, tmp_path, monkeypatch):
    """Play one trajectory of a function, or of what else the arguments say, with these turns.

    Returns the fake machine and the result. ``model`` is the run's frozen model.
    """

    def run(agent, *turns, changes=None, turn_s=0.0, scene=None, model=None, **spec):
        module = ModuleType("agents_of_tests")
        module.agent = agent  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        by_function = {} if agent is None else {"function": "agents_of_tests:agent"}

        async def main():
            given = {**by_function, "timeout_s": 30.0, **spec}
            there = model or AskedModel()
            async with there.listening():
                return await played(given, there.address)

        async def played(given, models):
            made = fake_machine(given, renderer, tmp_path, models, **(changes or {}))
            made.turn_s = turn_s
            try:
                await made.episodes.prepare(print)
                assert await made.episodes.check(0) > 0
                playing = scene(made) if scene else made.play(turns)
                result = await asyncio.wait_for(playing, DEADLINE_S)
            finally:
                await made.episodes.close()
            return made, result

        return asyncio.run(main())

    return run
