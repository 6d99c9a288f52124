"""Environments in real worker processes: what goes wrong costs one episode and leaves nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken, HostLost
from libra_cli.core.types import ToolOutcome, TrajectoryId
from libra_cli.envs.returns import LONGEST_OBSERVATION
from libra_cli.envs.workers import fork_server, wire
from libra_cli.envs.workers.wire import Frames, Kind
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.node.processes import proc
from libra_cli.runtime.episodes import workers
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.hosts.local import LocalTransport

ROOT = Path(__file__).parents[3]
DEADLINE_S = 50.0
PATIENT_S = 20.0
"""A time-out that only a hanging call reaches, on a busy machine too."""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=256)
    return Renderer(directory)


@pytest.fixture
def play(renderer):
    """Run ``scene(player)`` on an environment of ``tests.misbehaving`` in two workers at a time."""

    def run(
        scene,
        *,
        name="Misbehaving",
        timeout_s=PATIENT_S,
        secrets=None,
        nodes=(),
        episodes=None,
        **args,
    ):
        spec = EnvironmentSpec.model_validate(
            {
                "name": f"tests.misbehaving:{name}",
                "args": args,
                "tool_timeout_s": timeout_s,
                "workers": {"processes": 2, "nodes": list(nodes), "episodes": episodes},
                "secrets": secrets or {},
            }
        )

        async def main():
            player = Player(Episodes([spec], ["misbehaving"], renderer, open_on=open_on), renderer)
            try:
                return await scene(player)
            finally:
                await player.episodes.close()

        try:
            return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
        finally:
            assert children() == []

    return run


async def open_on(node, process, module):
    """A node is this machine, or cannot be reached."""
    if node.startswith("down"):
        raise HostLost(f"{node}: no answer")
    environment = [f"LIBRA_NODE={node}", f"PYTHONPATH={ROOT}"]
    return await LocalTransport().open_stream(["env", *environment, sys.executable, "-m", module])


def children():
    """The processes that this one has started and not waited for, but the helper that stays for the
    sandboxes of other tests."""
    started = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    helper = b"libra_cli.envs.sandbox.helper"
    return [pid for pid in started if helper not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def shown_of(pid):
    """What anybody may read of a process: its command line and its environment."""
    return [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]


class Player:
    """Plays turns that are given as texts and calls."""

    def __init__(self, episodes, renderer):
        self.episodes, self.renderer = episodes, renderer

    async def start(self, group=0):
        who = TrajectoryId(group, 0)
        prompt = await self.episodes.start(who, group, task_seed=3, seed=4)
        return self.renderer.decode(prompt)

    async def turn(self, *parts, group=0):
        texts = [
            part
            if isinstance(part, str)
            else f"<tool_call>\n{json.dumps({'name': part[0], 'arguments': part[1]})}\n</tool_call>"
            for part in parts
        ]
        ids = [*self.renderer.encode("".join(texts)), self.renderer.end_of_turn]
        return await self.episodes.advance(TrajectoryId(group, 0), ids, "stop")

    async def call(self, tool, group=0, **arguments):
        """The text and the outcome of one call."""
        result = await self.turn((tool, arguments), group=group)
        text = self.renderer.decode(result.observation_ids)
        text = text.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        return text, result.returns[0].outcome


def test_an_episode_in_a_process_of_its_own_from_prompt_to_reward(play):
    async def scene(player):
        prompt = await player.start(2)
        middle = await player.turn(("refuse", {}), ("arguments", {"a": [1, None]}), group=2)
        again = await player.turn("again", group=2)
        return prompt, middle, again, await player.turn("answer", group=2)

    prompt, middle, again, end = play(scene)
    assert "task 2" in prompt
    assert [one.outcome for one in middle.returns] == [ToolOutcome.ERROR, ToolOutcome.OK]
    assert not again.done
    assert end.done
    # user, two calls of one turn and their returns, "again", "once more", "answer"
    assert end.reward == 7 + 2 / 100
    assert end.metrics["pid"] not in (0, os.getpid())


def test_a_host_has_no_more_episodes_than_it_holds_and_the_next_waits(play):
    async def scene(player):
        for group in (0, 1, 2):
            await player.start(group)
        fourth = asyncio.create_task(player.start(3))
        await asyncio.sleep(0.2)
        assert not fourth.done()
        player.episodes.forget(TrajectoryId(1, 0))
        await fourth
        waited = [player.episodes.waited_of(TrajectoryId(group, 0)) for group in (2, 3)]
        hosts = [(await player.call("where", group=n))[0] for n in (0, 2, 3)]
        return waited, sorted(hosts)

    (at_once, later), hosts = play(scene, nodes=["one", "two"], episodes={"one": 1, "two": 2})
    assert hosts.count("one") == 1
    assert hosts.count("two") == 2
    assert later > 0.15
    assert later > at_once


def test_a_place_on_a_host_that_is_lost_is_none(play, monkeypatch):
    monkeypatch.setattr(workers, "LOOK_AGAIN_S", 0.05)

    async def scene(player):
        await player.start(0)
        second = asyncio.create_task(player.start(1))
        await asyncio.sleep(0.3)
        assert not second.done()  # it waits, and does not fail, while one host plays
        player.episodes.forget(TrajectoryId(0, 0))
        await second

    play(scene, nodes=["down", "up"], episodes=1)


def test_every_episode_has_a_process_and_the_module_is_imported_once(play):
    async def scene(player):
        await asyncio.gather(player.start(0), player.start(1))
        return [await player.call("pid", group=group) for group in (0, 1)]

    (first, _), (second, _) = play(scene)
    (one, loaded), (other, again) = first.split(), second.split()
    assert one != other
    assert loaded == again
    assert str(os.getpid()) not in (one, other, loaded)


def test_an_environment_with_threads_of_its_own_is_started_anew_for_every_episode(play):
    async def scene(player):
        await player.start()
        return await player.call("pid")

    text, _ = play(scene, name="Threaded")
    pid, loaded = text.split()
    assert pid == loaded


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("crash", "its process was ended by SIGSEGV; it last printed: the last words"),
        ("exit", "its process ended with code 3"),
    ],
)
@pytest.mark.parametrize("name", ["Misbehaving", "Awaiting", "Threaded"])
def test_a_crash_costs_the_episode_it_happened_in_and_no_other(play, name, tool, words):
    async def scene(player):
        await player.start(0)
        await player.start(1)
        with pytest.raises(EnvironmentBroken, match=words):
            await player.call(tool, group=0)
        with pytest.raises(EnvironmentBroken, match=words):
            await player.turn("answer", group=0)
        return await player.call("draw", group=1)

    assert play(scene, name=name)[1] is ToolOutcome.OK


def test_what_is_raised_is_told_and_the_episode_broken(play):
    async def scene(player):
        await player.start()
        await player.call("fall")

    with pytest.raises(EnvironmentBroken, match=r"broke in step\(fall\): KeyError: 'gone'"):
        play(scene)


@pytest.mark.parametrize("tool", ["hang", "ignore"])
def test_a_hang_times_out_and_its_process_is_killed_with_the_episode(play, tool, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 0.5)

    async def scene(player):
        await player.start(0)
        await player.start(1)
        text, outcome = await player.call(tool, group=0)
        hung = player.episodes.hung
        player.episodes.forget(TrajectoryId(0, 0))
        still = await player.call("draw", group=1)
        return text, outcome, hung, still[1]

    text, outcome, hung, still = play(scene, timeout_s=1.0)
    assert (text, outcome, hung) == ("tool timed out", ToolOutcome.TIMEOUT, 1)
    assert still is ToolOutcome.OK


def test_a_call_that_comes_back_late_leaves_the_environment_usable(play):
    async def scene(player):
        await player.start()
        late = await player.call("sleep", seconds=1.5)
        while player.episodes.hung:  # noqa: ASYNC110  another process ends it
            await asyncio.sleep(0.01)
        return late, await player.call("sleep", seconds=0.0)

    late, then = play(scene, timeout_s=1.0)
    assert late[1] is ToolOutcome.TIMEOUT
    assert then == ("slept", ToolOutcome.OK)


def test_fifty_megabytes_returned_or_printed_are_shortened_or_dropped(play):
    async def scene(player):
        await player.start()
        printed = await player.call("chatter", megabytes=50)
        return printed, await player.turn(("large", {"megabytes": 50}))

    printed, large = play(scene)
    assert printed == ("printed", ToolOutcome.OK)
    assert large.returns[0].characters == 50 << 20
    assert len(large.observation_ids) < 2 * LONGEST_OBSERVATION


@pytest.mark.parametrize(
    ("kind", "words"),
    [("number", "returned int"), ("nan", "returned nan"), ("none", "returned NoneType")],
)
def test_what_is_not_of_the_protocol_is_told_by_the_worker(play, kind, words):
    async def scene(player):
        await player.start()
        await player.call("odd", kind=kind)

    with pytest.raises(EnvironmentBroken, match=words):
        play(scene)


@pytest.mark.parametrize("given", ["plain", "\ud800", 10**60, -(10**60), {"a": [[]] * 3}])
def test_arguments_that_a_model_can_write_arrive_as_they_are(play, given):
    async def scene(player):
        await player.start()
        return await player.call("arguments", value=given)

    text, _ = play(scene)
    shown = repr({"value": given})
    assert text == shown


def test_secrets_go_over_the_pipe(play):
    async def scene(player):
        await player.start()
        assert not any(b"hidden" in text for pid in children() for text in shown_of(pid))
        return await player.call("secret", name="KEY")

    assert play(scene, secrets={"KEY": "hidden"})[0] == "hidden, on the command line: False"


def test_workers_draw_different_numbers(play):
    async def scene(player):
        await asyncio.gather(*(player.start(group) for group in range(4)))
        return [await player.call("draw", group=group) for group in range(4)]

    assert len(set(play(scene))) == 4


def still_alive(pids: list[int]) -> list[int]:
    """Those that live after a second: one that was killed takes its turn on a core to die."""
    deadline = time.monotonic() + 1.0
    while True:
        found = [(pid, proc.status(pid)) for pid in pids]
        left = [pid for pid, one in found if one is not None and one.state not in "ZX"]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def test_close_is_called_and_processes_that_were_left_are_ended(play, tmp_path):
    closed, child = tmp_path / "closed", tmp_path / "child"

    async def scene(player):
        await player.start()
        await player.call("leak", path=str(child))
        player.episodes.forget(TrajectoryId(0, 0))

    play(scene, closed=str(closed))
    assert closed.read_text() == "closed"
    assert still_alive([int(child.read_text())]) == []


def test_what_an_environment_starts_while_it_is_loaded_ends_with_its_fork_server(play, tmp_path):
    pids = tmp_path / "pids"

    async def scene(player):
        await player.start()
        return await player.turn("answer")

    started = time.monotonic()
    play(scene, name="Starter", pids=str(pids))
    assert time.monotonic() - started < 2 * workers.GRACE_S
    started_by_it = [int(pid) for pid in pids.read_text().split()]
    assert len(started_by_it) == 2
    assert still_alive(started_by_it) == []


def test_no_more_work_at_once_than_there_are_processes_for(play):
    async def scene(player):
        await asyncio.gather(*(player.start(group) for group in range(4)))
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(player.call("sleep", group=g, seconds=0.5) for g in range(4)))
        return loop.time() - began

    assert play(scene) >= 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Missing", "has no attribute 'Missing'|did you mean"),
        ("impatient", "its fork server ended with code 4"),
        ("Misbehaving", "unexpected keyword argument 'wrong'"),
    ],
)
def test_an_environment_that_cannot_be_made_is_told_at_the_start(play, name, words):
    async def scene(player):
        await player.episodes.check(seed=0)

    arguments = {"wrong": 1} if name == "Misbehaving" else {}
    with pytest.raises(EnvironmentBroken, match=words):
        play(scene, name=name, **arguments)


def test_a_fork_server_that_was_killed_is_started_again(play):
    async def scene(player):
        await player.start(0)
        (server,) = children()
        os.kill(int(server), 9)
        with pytest.raises(EnvironmentBroken, match="its fork server ended with code -9"):
            await player.call("draw", group=0)
        await player.start(1)
        return await player.call("draw", group=1)

    assert play(scene)[1] is ToolOutcome.OK


def test_a_failing_reset_is_told_and_its_process_is_gone(play):
    async def scene(player):
        await player.start()

    with pytest.raises(EnvironmentBroken, match="broke in reset: RuntimeError: no reset today"):
        play(scene, fail="reset")


def test_episodes_are_spread_over_the_nodes_that_can_be_reached(play):
    async def scene(player):
        for group in range(4):
            await player.start(group)
        return [(await player.call("where", group=group))[0] for group in range(4)]

    assert sorted(play(scene, nodes=("up-1", "down", "up-2"))) == ["up-1"] * 2 + ["up-2"] * 2


def test_no_node_that_can_be_reached_is_told(play, monkeypatch):
    monkeypatch.setattr(workers, "UNREACHABLE_S", 0.0)

    async def scene(player):
        await player.start()

    with pytest.raises(EnvironmentBroken, match="can be reached: down: no answer"):
        play(scene, nodes=("down",))


@pytest.mark.parametrize("lacking", ["fork", "pidfd_open"])
def test_a_machine_that_can_start_no_process_costs_the_episode_alone(monkeypatch, lacking):
    def refuse(*_):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    incoming, outgoing = os.pipe()
    files = len(os.listdir("/proc/self/fd"))
    server = fork_server.ForkServer(incoming, outgoing)
    monkeypatch.setattr(server, "_make", lambda: None)
    monkeypatch.setattr(os, lacking, refuse)
    if lacking == "pidfd_open":
        monkeypatch.setattr(os, "fork", lambda: sleeping().pid)
    server._happened(Kind.CALL, 7, b"")
    ((kind, episode, body),) = Frames().feed(os.read(incoming, 4096))
    words = "no process can be started for it: Resource temporarily unavailable"
    assert (kind, episode, wire.unpack(body)) == (Kind.ENDED, 7, words)
    server._selector.close()
    assert len(os.listdir("/proc/self/fd")) == files
    assert children() == []
    os.close(incoming)
    os.close(outgoing)


def sleeping():
    process = subprocess.Popen(["sleep", "100"], process_group=0)
    process.returncode = 0  # whoever has asked for it waits for it
    return process
