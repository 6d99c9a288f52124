"""Commands that play as agents on hosts which are reached by real SSH."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_cli.config.errors import AgentFailed
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.agents.episodes import AgentEpisodes
from libra_cli.runtime.episodes.renderer import Renderer
from tests.agents import FakeMachine, recipe
from tests.integration.test_environment_hosts import NAMES, cluster_of
from tests.integration.test_hosts import PULSE_S, net, opened, run_id
from tests.netns import marked, missing

DEADLINE_S = 60.0
__all__ = ["net", "run_id"]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(90),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

AGENT = """
import json, os, time, urllib.request

def post(url, body):
    data = json.dumps(body).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return json.load(answer)

messages = json.load(open(os.environ["LIBRA_TASK"]))["messages"]
for _ in range(20):
    body = {"model": "m", "messages": messages}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    messages.append(answer["choices"][0]["message"])
    messages.append({"role": "user", "content": "more"})
    time.sleep(0.1)
reward = 1.0 + ("host-1", "host-2").index(os.environ["LIBRA_NODE"])
post(os.environ["LIBRA_REWARD_URL"], {"reward": reward})
"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=10_000)
    return Renderer(directory)


class Cut:
    """The turns of trajectories; at the fifth of them all, something happens."""

    def __init__(self, happen):
        self.happen = happen
        self.left = 5

    def turns(self) -> Iterator[str]:
        for _ in range(20):
            self.left -= 1
            if self.left == 0:
                self.happen()
            yield "said"


def test_commands_play_on_hosts_and_a_host_that_is_lost_costs_its_own(
    net, tmp_path, run_id, renderer
):
    files = tmp_path / "files"
    files.mkdir()
    (files / "agent.py").write_text(AGENT)
    made = recipe(
        {
            "command": ["python3", "agent.py"],
            "directory": str(files),
            "nodes": NAMES,
            "timeout_s": 25,
        },
        nodes=[{"host": name} for name in NAMES],
        model={"max_len": 4096},
        rollout={"max_turns": 100},
    )

    failures: list[str] = []
    places: list[Path] = []

    async def four(episodes: AgentEpisodes, cut: Cut, first: int) -> list[float]:
        machines = [FakeMachine(episodes, renderer, 100) for _ in range(4)]
        playing = (
            machine.play(cut.turns(), member=first + n) for n, machine in enumerate(machines)
        )
        results = await asyncio.gather(*playing, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, AgentFailed):
                raise result
            if isinstance(result, AgentFailed):
                failures.append(str(result))
        return sorted(0.0 if isinstance(r, BaseException) else r.reward or 0.0 for r in results)

    async def scene() -> None:
        async with (
            opened(net, 0, tmp_path, run_id, ping_interval_s=PULSE_S) as (one, _),
            opened(net, 1, tmp_path, run_id, ping_interval_s=PULSE_S) as (two, _),
        ):
            cluster = cluster_of({"host-1": one, "host-2": two}, run_id)
            episodes = AgentEpisodes(
                made, renderer, tmp_path, note=print, open_on=cluster.open_stream
            )
            try:
                await episodes.prepare(print)
                assert await episodes.check(seed=0) > 0
                assert await four(episodes, Cut(lambda: None), 0) == [1.0, 1.0, 2.0, 2.0], failures
                places.extend(Path(host.tmp_dir) for host in (one, two))
                assert all(list(place.glob("libra-agents-*")) for place in places)
                cut = Cut(lambda: net.cut(net.hosts[0]))
                assert await four(episodes, cut, 4) == [0.0, 0.0, 2.0, 2.0], failures
                net.heal(net.hosts[0])
            finally:
                net.heal(net.hosts[0])
                await episodes.close()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_S))
    assert not [pid for pid in marked(run_id) if b"agent.py" in command_line(pid)]
    assert not [place for place in places if place.exists()]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
