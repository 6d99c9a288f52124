"""How many turns a second the agents' endpoint takes, and what it adds to each of them.

    python -m tests.research.proxy --agents 1 64 512 --turns 8

Agents run in a process of their own, fetch their tasks as agents elsewhere do, and ask turn after
turn over Chat Completions, each with its whole conversation and 400 characters of a tool's text
more; between two turns each works for ``--think-s`` seconds on average. Turns are there at once:
what a request takes is what the endpoint adds (HTTP, reading, matching, rendering, waiting for the
one event loop). CPU seconds are the endpoint's process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import aiohttp

from libra_cli.core.types import TrajectoryId
from libra_cli.envs.pointer_chase import call_text
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.agents.episodes import AgentEpisodes
from libra_cli.runtime.episodes.renderer import Renderer
from tests.agents import recipe

TEXT = "the quick brown fox jumps over the lazy dog, again. " * 8
MAX_LEN = 1_000_000


async def _serve(agents: int, turns: int, think_s: float, directory: Path) -> dict[str, float]:
    model = directory / "model"
    model.mkdir()
    save_tokenizer(build_tokenizer(), model, max_len=MAX_LEN)
    renderer = Renderer(model)
    made = recipe(
        {"external": True, "max_branches": 1},
        model={"max_len": MAX_LEN},
        rollout={"max_turns": turns},
        training={"micro_batch_tokens": MAX_LEN},
    )
    episodes = AgentEpisodes(made, renderer, directory, note=lambda words: None)
    await episodes.prepare(lambda words: None)
    await episodes.check(0)
    said = array("i", [*renderer.encode(call_text("ab")), renderer.end_of_turn])
    numbers = ["--agents", str(agents), "--turns", str(turns), "--think-s", str(think_s)]
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.research.proxy", "--client", str(directory), *numbers),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        (cpu, began), (cpu_end, ended) = await _answer_all(episodes, agents, turns, said)
        output, _ = await client.communicate()
    finally:
        if client.returncode is None:
            client.kill()
        await episodes.close()
    found: dict[str, float] = json.loads(output)
    seconds = ended - began
    found |= {
        "turns_per_s": agents * turns / seconds,
        "cpu_share": (cpu_end - cpu) / seconds,
        "cpu_ms_per_turn": 1000 * (cpu_end - cpu) / (agents * turns),
    }
    return found


def _now() -> tuple[float, float]:
    return time.process_time(), time.monotonic()


async def _answer_all(
    episodes: AgentEpisodes, agents: int, turns: int, said: array[int]
) -> tuple[tuple[float, float], tuple[float, float]]:
    begun = asyncio.Event()
    first: list[tuple[float, float]] = []

    async def one(number: int) -> None:
        who = TrajectoryId(number, 0)
        await episodes.start(who, number, task_seed=0, seed=0)
        if not first:
            first.append(_now())
        begun.set()
        done = False
        for _ in range(turns):
            done = (await episodes.advance(who, said, "stop")).done
        assert done
        episodes.forget(who)

    await asyncio.gather(*map(one, range(agents)))
    return first[0], _now()


async def _play_all(directory: Path, agents: int, turns: int, think_s: float) -> dict[str, float]:
    told = json.loads((directory / "agents.json").read_text())
    waits: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, raise_for_status=True) as session:
        headers = {"Authorization": f"Bearer {told['token']}"}
        jobs = []
        for _ in range(agents):
            async with session.post(f"{told['url']}/tasks", headers=headers) as answer:
                jobs.append(await answer.json())
        await asyncio.gather(*(_play(session, job, turns, think_s, waits) for job in jobs))
    waits.sort()
    return {
        "p50_ms": 1000 * waits[len(waits) // 2],
        "p99_ms": 1000 * waits[int(0.99 * (len(waits) - 1))],
    }


async def _play(
    session: aiohttp.ClientSession,
    job: dict[str, Any],
    turns: int,
    think_s: float,
    waits: list[float],
) -> None:
    messages = list(job["task"]["messages"])
    for _ in range(turns):
        await asyncio.sleep(2 * think_s * random.random())
        asked = time.monotonic()
        url, body = f"{job['base_url']}/chat/completions", {"model": "m", "messages": messages}
        async with session.post(url, json=body) as answer:
            message = (await answer.json())["choices"][0]["message"]
        waits.append(time.monotonic() - asked)
        messages.append(message)
        call = message["tool_calls"][0]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": TEXT[:400]})
    async with session.post(f"{job['root_url']}/reward", json={"reward": 1.0}):
        pass


def main() -> None:
    """Print a line for each number of agents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--think-s", type=float, default=0.0, help="mean, between two turns")
    parser.add_argument("--client", type=Path)
    options = parser.parse_args()
    if options.client is not None:
        agents, turns, think_s = options.agents[0], options.turns, options.think_s
        found = asyncio.run(_play_all(options.client, agents, turns, think_s))
        sys.stdout.write(json.dumps(found))
        return
    sys.stdout.write(f"load {os.getloadavg()[0]:.1f}\n")
    for agents in options.agents:
        with tempfile.TemporaryDirectory() as directory:
            found = asyncio.run(_serve(agents, options.turns, options.think_s, Path(directory)))
        sys.stdout.write(
            f"{agents:4} agents: {found['turns_per_s']:6.0f} turns/s, P50 {found['p50_ms']:.1f} ms,"
            f" P99 {found['p99_ms']:.1f} ms, CPU {found['cpu_ms_per_turn']:.2f} ms a turn,"
            f" {100 * found['cpu_share']:.0f} % of a core\n"
        )


if __name__ == "__main__":
    main()
