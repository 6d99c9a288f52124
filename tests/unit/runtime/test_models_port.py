"""Environments on other hosts that ask the run's models, by a port of the host's own loopback."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from libra_cli.config.errors import EnvironmentBroken, HostError
from libra_cli.config.frozen_models import KEY, arguments_at, endpoint_in
from libra_cli.core.types import TrajectoryId
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.models_port import MODULE, ModelsPort
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.hosts.transport import ByteStream
from tests.asked_model import AskedModel

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0
NODES = ("one", "two")


async def open_on(node: str, process: str, module: str) -> ByteStream:
    """Run a module as on a node, which is this machine."""
    said = [f"LIBRA_NODE={node}", f"PYTHONPATH={ROOT}"]
    return await LocalTransport().open_stream(["env", *said, sys.executable, "-m", module])


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=256)
    return Renderer(directory)


@pytest.fixture
def play(renderer: Renderer, tmp_path: Path) -> Any:
    """Run ``scene(model, ask)``, where ``ask`` plays episodes to their rewards."""

    def run(scene: Callable[[AskedModel, Any], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with AskedModel().listening() as model:
                spec = model.judged(tmp_path, NODES)
                episodes = Episodes([spec], ["judged"], renderer, open_on=open_on)

                async def ask(*numbers: int) -> list[float | None]:
                    who = [TrajectoryId(number, 0) for number in numbers]
                    for each in who:
                        await episodes.start(each, each.group, task_seed=0, seed=0)
                    answer = [*renderer.encode("b"), renderer.end_of_turn]
                    ended = (episodes.advance(each, answer, "stop") for each in who)
                    return [end.reward for end in await asyncio.gather(*ended)]

                try:
                    await scene(model, ask)
                finally:
                    await episodes.close()

        asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
        assert relays() == []

    return run


def relays() -> list[int]:
    """The processes of this test that carry connections."""
    started = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [
        int(pid) for pid in started if MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


async def until_played(ask: Any) -> None:
    """Play two episodes at a time, as a run does whose first ones have failed: a host is asked
    until it is noticed that nothing leads from there to the models."""
    for first in itertools.count(2, step=2):
        with contextlib.suppress(EnvironmentBroken):
            assert await ask(first, first + 1) == [0.7] * 2
            return


async def until_gone(pids: list[int]) -> None:
    """Wait for what nothing tells of; the scene has a deadline."""
    while True:
        if not set(relays()) & set(pids):
            return
        await asyncio.sleep(0.01)


def test_each_host_reaches_the_models_by_a_port_of_its_own(play: Any) -> None:
    async def scene(model: AskedModel, ask: Any) -> None:
        assert await ask(*range(4)) == [0.7] * 4
        called = set(model.called)
        assert len(called) == len(NODES)
        assert model.address.url.removeprefix("http://") not in called
        for one in called:
            assert one.startswith("127.0.0.1:")
            url = f"http://{one}/judge/v1/chat/completions"
            async with aiohttp.ClientSession() as session, session.post(url, json={}) as answer:
                assert answer.status == 401, "there too nobody is answered without the key"
        assert set(model.called) == called

    play(scene)


def test_a_port_that_is_gone_is_opened_again_with_its_workers(play: Any) -> None:
    async def scene(model: AskedModel, ask: Any) -> None:
        await ask(0, 1)
        before = relays()
        assert len(before) == len(NODES)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until_gone(before)
        first = set(model.called)
        await until_played(ask)
        assert first.isdisjoint(model.called[2:])

    play(scene)


def test_a_host_that_does_not_listen_says_why() -> None:
    async def main() -> None:
        broken = ["sh", "-c", "echo no memory >&2; exit 3"]
        stream = await LocalTransport().open_stream(broken)
        port = ModelsPort("a", stream, "http://127.0.0.1:9")
        with pytest.raises(HostError, match="a: the process that leads to models has ended"):
            await port.url()
        assert port.ended
        await port.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_only_the_models_of_the_run_are_elsewhere() -> None:
    ours = {"url": "http://127.0.0.1:5/judge/v1", "model": "judge", "api_key": KEY, "scale": [0, 1]}
    theirs = {"url": "http://127.0.0.1:5/v1", "model": "gpt", "api_key": "MY_KEY"}
    told = {"user": theirs, "all": [{"judge": ours}]}
    assert endpoint_in(told) == "http://127.0.0.1:5"
    assert endpoint_in({"user": theirs, "text": "url"}) is None
    moved = {**ours, "url": "http://127.0.0.1:7/judge/v1"}
    assert arguments_at(told, "http://127.0.0.1:7") == {"user": theirs, "all": [{"judge": moved}]}
