"""Many sandboxes at once on three hosts that are reached by SSH, until what keeps them is killed.

``python -m tests.research.sandbox_crowd [SANDBOXES]``, as root: a controller of its own process
begins an episode of ``environment: shell`` for each sandbox, through agents, fork servers and
workers as a run does, and prints

    start       seconds from a place to the first prompt, without the wait for the place
    commands    tool calls a second, through all of that, with every sandbox open
    memory      what the processes of a sandbox and its worker have for themselves (Pss)
    at rest     seconds of CPU a second that all of them take together while nothing is played

Then the controller and the agents get SIGKILL, and what is left on the hosts is counted until
nothing is.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import initial_plan
from libra_cli.core.types import TrajectoryId
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.hosts.host import Host
from tests.integration.test_hosts import opened
from tests.integration.test_sandbox_hosts import found, show_all_of_proc
from tests.netns import Network, network
from tests.research.sandbox_speed import KIB, pss_kib

HOSTS = 3
PLACES = 2
"""Calls that a host works on at the same time."""
ROUNDS = 2
"""Commands of each sandbox."""
REST_S = 10.0
LEASE_S = 3.0
PULSE_S = 0.5
GONE_S = 120.0


def main(many: int) -> None:
    """Open them, measure, kill everything, and count what is left."""
    run = f"crowd-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="libra-crowd-") as name:
        directory = Path(name)
        with network(HOSTS, directory) as net:
            for host in net.hosts:
                show_all_of_proc(net, host)
            before = pids(net)
            heard, controller = forked_controller(net, directory, run, many)
            try:
                say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {HOSTS} hosts")
                print_answers(heard)
                crowd = pids(net) - before
                told_memory(crowd, many)
                told_rest(crowd, many)
            finally:
                os.kill(controller, signal.SIGKILL)
                os.waitpid(controller, 0)
            for pid in found(f"agent.main serve .*{run}"):
                os.kill(pid, signal.SIGKILL)
            count_what_is_left(net, before)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def forked_controller(net: Network, directory: Path, run: str, many: int) -> tuple[int, int]:
    """Return what is heard of a controller in a process of its own, and its pid."""
    heard, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        return heard, pid
    try:
        asyncio.run(play(net, directory, run, many, told))
    except BaseException as error:  # noqa: BLE001  told to whoever listens
        os.write(told, "".join(traceback.format_exception(error)).encode()[-4000:])
    finally:
        os._exit(1)


def print_answers(heard: int) -> None:
    """Print what the controller measures, until it says that it has ended to measure."""
    with os.fdopen(heard) as lines:
        for line in lines:
            if line == "measured\n":
                return
            say(line.rstrip())
    raise SystemExit("the controller has failed")


async def play(net: Network, directory: Path, run: str, many: int, told: int) -> None:
    """Open the sandboxes, run commands in all of them, and keep them until it is killed."""
    renderer = renderer_in(directory)
    names = [host.name for host in net.hosts]
    async with AsyncExitStack() as stack:
        hosts = {
            name: (
                await stack.enter_async_context(
                    opened(net, at, directory, run, lease_s=LEASE_S, ping_interval_s=PULSE_S)
                )
            )[0]
            for at, name in enumerate(names)
        }
        cluster = cluster_of(hosts, run)
        episodes = Episodes(
            [shell_on(names, directory)], ["shell"], renderer, open_on=cluster.open_stream
        )
        await episodes.check(seed=0)
        for n in range(HOSTS):  # each starts the fork server of another host
            await episodes.start(TrajectoryId(n, 1), n, task_seed=0, seed=0)
        for n in range(HOSTS):
            episodes.forget(TrajectoryId(n, 1))
        who = [TrajectoryId(n, 0) for n in range(many)]
        began = time.monotonic()
        starts = await asyncio.gather(*(start(episodes, one) for one in who))
        took = time.monotonic() - began
        p50, p99 = (1000 * float(np.percentile(starts, share)) for share in (50, 99))
        line = f"start: P50 {p50:.0f} ms, P99 {p99:.0f} ms, {PLACES} at a time on each host; "
        os.write(told, f"{line}{many} in {took:.1f} s\n".encode())
        began = time.monotonic()
        await asyncio.gather(*(commands(episodes, renderer, one) for one in who))
        rate = ROUNDS * many / (time.monotonic() - began)
        os.write(told, f"commands: {rate:.0f} a second\nmeasured\n".encode())
        await asyncio.sleep(3600)


async def start(episodes: Episodes, who: TrajectoryId) -> float:
    """Begin an episode, and return how long it took once it had a place, in seconds."""
    began = time.monotonic()
    await episodes.start(who, who.group, task_seed=0, seed=0)
    return time.monotonic() - began - episodes.waited_of(who)


async def commands(episodes: Episodes, renderer: Renderer, who: TrajectoryId) -> None:
    call = json.dumps({"name": "bash", "arguments": {"command": "true"}})
    turn = [*renderer.encode(f"<tool_call>\n{call}\n</tool_call>"), renderer.end_of_turn]
    for _ in range(ROUNDS):
        result = await episodes.advance(who, turn, "stop")
        assert result.returns[0].outcome.value == "ok", result.returns


def renderer_in(directory: Path) -> Renderer:
    (directory / "model").mkdir()
    save_tokenizer(build_tokenizer(), directory / "model", max_len=4096)
    return Renderer(directory / "model")


def shell_on(nodes: list[str], directory: Path) -> EnvironmentSpec:
    rows = directory / "tasks.jsonl"
    rows.write_text(json.dumps({"instruction": "Wait.", "check": "true"}))
    workers = {"processes": PLACES, "nodes": nodes}
    told = {"name": "shell", "tasks": str(rows), "sandbox": {}, "workers": workers}
    return EnvironmentSpec.model_validate(told | {"tool_timeout_s": 120.0})


def cluster_of(hosts: Mapping[str, Host], run: str) -> Cluster:
    """The hosts as a run has them, of which only streams are wanted."""
    nodes = [{"host": name} for name in hosts]
    recipe = Recipe.model_validate({"nodes": nodes, "model": {"path": "/m"}})
    plan, secrets = initial_plan(recipe), RunSecrets.new()
    saved: list[Any] = []
    cluster = Cluster(recipe, plan, run_id=run, secrets=secrets, save=saved.append, clock=time.time)
    cluster.hosts.update(hosts)
    return cluster


def pids(net: Network) -> set[int]:
    """The processes of all hosts, those in sandboxes too, which have pids of their own there."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    ahead = [pid for host in net.hosts for pid in net.machine(host).pids()]
    while ahead:
        pid = ahead.pop()
        if pid not in found:
            found.add(pid)
            ahead += children.get(pid, ())
    return found


def told_memory(crowd: Iterable[int], many: int) -> None:
    known = sorted(crowd)
    memory = sum(pss_kib(str(pid)) for pid in known)
    say(f"memory: {len(known) / many:.1f} processes and {memory / many / KIB:.1f} MiB each")


def told_rest(crowd: Iterable[int], many: int) -> None:
    known = sorted(crowd)
    before, began = cpu_s(known), time.monotonic()
    time.sleep(REST_S)
    rate = (cpu_s(known) - before) / (time.monotonic() - began)
    say(f"at rest: {rate:.2f} of a core, {1e3 * rate / many:.2f} ms a second each")


def cpu_s(crowd: Iterable[int]) -> float:
    """Seconds of CPU that these processes have had, as far as they are there: by the scheduler,
    since the kernel's ticks miss what runs for less than one."""
    total = 0
    for pid in crowd:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return total / 1e9


def count_what_is_left(net: Network, before: set[int]) -> None:
    """Count the processes that are left on the hosts, until none is.

    Raises:
        SystemExit: some are left after ``GONE_S`` seconds.
    """
    began = time.monotonic()
    while left := pids(net) - before:
        if time.monotonic() - began > GONE_S:
            raise SystemExit(f"{len(left)} processes are left: {sorted(left)[:10]}")
        time.sleep(0.2)
    say(f"left: 0 processes {time.monotonic() - began:.1f} s after controller and agents died")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
