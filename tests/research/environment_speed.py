"""How fast environments are played in the controller and in workers, and what the loop notices.

``python -m tests.research.environment_speed [EPISODES]`` prints a table. An episode is a reset,
eight tool calls and a score; all are played at once. ``instant`` answers at once, ``computing``
keeps a core busy for 20 ms a call. Lag is how late a task that sleeps for a millisecond wakes up.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.core.types import TrajectoryId
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer

TURNS = 8
TOOLS = {"instant": ("draw", {}), "computing": ("compute", {"seconds": 0.02})}
WAYS = {"controller": {}, "2 workers": {"workers": 2}, "64 workers": {"workers": 64}}

HEADER = "environment  where        turns/s  resets/s  lag P50    P99    max ms  CPU s  children's"


async def main(episodes: int, renderer: Renderer) -> None:
    """Play every kind in every way."""
    sys.stdout.write(f"{HEADER}\n")
    for kind, (tool, arguments) in TOOLS.items():
        text = json.dumps({"name": tool, "arguments": arguments})
        turn = [*renderer.encode(f"<tool_call>\n{text}\n</tool_call>"), renderer.end_of_turn]
        number = episodes if kind == "instant" else max(1, episodes // 8)
        for where, how in WAYS.items():
            sys.stdout.write(f"{kind:12} {where:12} {await one(how, renderer, turn, number)}\n")


async def one(how: dict[str, int], renderer: Renderer, turn: list[int], episodes: int) -> str:
    """Play so many episodes at once."""
    name = "tests.misbehaving:Misbehaving"
    spec = EnvironmentSpec.model_validate({"name": name, "tool_timeout_s": 300, **how})
    player = Episodes([spec], ["speed"], renderer)
    await player.check(seed=0)  # starts what has to be started
    who = [TrajectoryId(n, 0) for n in range(episodes)]
    lags: list[float] = []
    watching = asyncio.create_task(watch(lags))
    cpu, others = time.process_time(), children_s()
    with timed() as reset_s:
        await asyncio.gather(*(player.start(w, w.group, task_seed=0, seed=0) for w in who))
    with timed() as turns_s:
        await asyncio.gather(*(play(player, w, turn) for w in who))
    cpu = time.process_time() - cpu
    watching.cancel()
    await player.close()
    others = children_s() - others
    lags.sort()
    p50, p99 = (1e3 * lags[int(share * (len(lags) - 1))] for share in (0.5, 0.99))
    speed = f"{episodes * TURNS / turns_s[0]:7.0f} {episodes / reset_s[0]:9.0f}"
    return f"{speed} {p50:8.2f} {p99:6.1f} {1e3 * lags[-1]:8.1f} {cpu:6.2f} {others:10.2f}"


async def play(player: Episodes, who: TrajectoryId, turn: list[int]) -> None:
    """Eight turns and the score."""
    for _ in range(TURNS):
        await player.advance(who, turn, "stop")
    await player.finish(who)
    player.forget(who)


def children_s() -> float:
    """CPU seconds of all processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def watch(lags: list[float]) -> None:
    """Note how late the loop is."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - before - 0.001)


@contextmanager
def timed() -> Iterator[list[float]]:
    """Seconds, as the only item."""
    seconds: list[float] = []
    began = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - began)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        save_tokenizer(build_tokenizer(), Path(directory), max_len=256)
        asyncio.run(main(int((sys.argv[1:] or ["256"])[0]), Renderer(Path(directory))))
