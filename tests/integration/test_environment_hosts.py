"""Environments in worker processes of hosts that are reached by real SSH."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import initial_plan
from libra_cli.core.types import ToolOutcome, TrajectoryId
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.hosts.cluster import Cluster
from tests.asked_model import AskedModel
from tests.integration.test_hosts import PULSE_S, net, opened, run_id
from tests.netns import missing

DEADLINE_S = 60.0
NAMES = ("host-1", "host-2")
__all__ = ["net", "run_id"]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(90),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=256)
    return Renderer(directory)


def cluster_of(hosts: Any, run: str) -> Cluster:
    nodes = [{"host": name} for name in NAMES]
    recipe = Recipe.model_validate({"nodes": nodes, "model": {"path": "/m"}})
    cluster = Cluster(
        recipe,
        initial_plan(recipe),
        run_id=run,
        secrets=RunSecrets.new(),
        save=list[Any]().append,
        clock=time.time,
    )
    cluster.hosts.update(hosts)
    return cluster


def turn(renderer: Renderer, key: str) -> list[int]:
    call = json.dumps({"name": "get", "arguments": {"key": key}})
    return [*renderer.encode(f"<tool_call>\n{call}\n</tool_call>"), renderer.end_of_turn]


def test_episodes_are_played_on_hosts_and_survive_the_loss_of_one(net, tmp_path, run_id, renderer):
    spec = EnvironmentSpec.model_validate(
        {
            "name": "pointer-chase",
            "workers": {"processes": 4, "nodes": NAMES},
            "tool_timeout_s": 15,
        }
    )

    async def scene() -> None:
        async with (
            opened(net, 0, tmp_path, run_id, ping_interval_s=PULSE_S) as (one, _),
            opened(net, 1, tmp_path, run_id, ping_interval_s=PULSE_S) as (two, _),
        ):
            cluster = cluster_of({"host-1": one, "host-2": two}, run_id)
            episodes = Episodes([spec], ["chase"], renderer, open_on=cluster.open_stream)
            try:
                assert await episodes.check(seed=0) > 0
                who = [TrajectoryId(0, member) for member in range(4)]
                for each in who:
                    await episodes.start(each, 0, task_seed=0, seed=each.member)
                results = [await episodes.advance(w, turn(renderer, "ab"), "stop") for w in who]
                assert all(result.returns for result in results)
                net.cut(net.hosts[0])
                played = 0
                for each in who:
                    with contextlib.suppress(EnvironmentBroken):
                        result = await episodes.advance(each, turn(renderer, "cd"), "stop")
                        played += result.returns[0].outcome is not ToolOutcome.TIMEOUT
                assert played == 2, "half of the episodes were on the other host"
                again = TrajectoryId(0, 9)
                await episodes.start(again, 0, task_seed=0, seed=0)
                net.heal(net.hosts[0])
            finally:
                net.heal(net.hosts[0])
                await episodes.close()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_S))


def test_environments_on_hosts_ask_the_models_of_the_run(net, tmp_path, run_id, renderer):
    async def scene() -> None:
        async with (
            AskedModel().listening() as model,
            opened(net, 0, tmp_path, run_id) as (one, _),
            opened(net, 1, tmp_path, run_id) as (two, _),
        ):
            cluster = cluster_of({"host-1": one, "host-2": two}, run_id)
            spec = model.judged(tmp_path, NAMES)
            episodes = Episodes([spec], ["judged"], renderer, open_on=cluster.open_stream)
            answer = [*renderer.encode("b"), renderer.end_of_turn]
            try:
                who = [TrajectoryId(0, member) for member in range(4)]
                for each in who:
                    await episodes.start(each, 0, task_seed=0, seed=each.member)
                results = [await episodes.advance(each, answer, "stop") for each in who]
                assert [result.reward for result in results] == [0.7] * 4
                # Neither is the controller's own port, which is not to be reached from there.
                assert len({*model.called, model.address.url.removeprefix("http://")}) == 3
            finally:
                await episodes.close()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_S))
