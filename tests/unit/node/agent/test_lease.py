"""The lease of a run on one host, which an agent and its guard hold together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_cli.node.agent.lease import link as links
from libra_cli.node.agent.lease.guard import AGENT_S, LONGEST_PAUSE_S, Guard
from libra_cli.node.agent.lease.holder import Lease
from libra_cli.node.agent.lease.link import BEAT_S, SILENCE_S, LeaseLink
from libra_cli.node.processes import proc
from libra_cli.node.processes.proc import Marker
from tests.netns import marked

DEADLINE_S = 20.0


SOCKETS: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while SOCKETS:
        SOCKETS.pop().close()


def pair() -> tuple[LeaseLink, LeaseLink]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    SOCKETS.extend(ends)
    one, other = ends
    return LeaseLink(one), LeaseLink(other)


class Scene:
    """A guard whose agent is the other end of a link."""

    def __init__(self, *, lease_s: float = 60.0) -> None:
        mine, self.agent = pair()
        self.starts: list[tuple[float, float]] = []
        self.stops = 0
        deadline = time.monotonic() + lease_s
        self.guard = Guard(Path("/r"), mine, deadline, lease_s, self.start, self.stop)

    def start(self, deadline: float, lease_s: float) -> LeaseLink:
        self.starts.append((deadline, lease_s))
        mine, self.agent = pair()
        return mine

    def stop(self) -> bool:
        self.stops += 1
        return True


def test_a_lease_that_is_renewed_ends_with_the_new_one_and_not_with_the_old() -> None:
    async def scene() -> None:
        over = asyncio.Event()
        lease = Lease(Path("/r"), None, over.set)
        lease.renew(0.02)
        lease.renew(60.0)
        await asyncio.sleep(0.1)
        assert not over.is_set()
        lease.renew(0.02)
        await asyncio.wait_for(over.wait(), DEADLINE_S)

    asyncio.run(scene())


def test_a_guard_starts_an_agent_that_died_with_the_lease_it_had_left() -> None:
    scene = Scene()
    scene.agent.tell(12345.0, 99.0)
    scene.guard.turn()
    scene.agent.close()
    scene.guard.turn()
    assert scene.starts == []
    scene.guard.turn()
    assert scene.starts == [(12345.0, 99.0)]


def test_a_guard_waits_longer_for_each_agent_that_dies_until_one_speaks(monkeypatch) -> None:
    scene = Scene(lease_s=1e6)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def die() -> None:
        scene.agent.close()
        scene.guard.turn()
        scene.guard.turn()

    for _ in range(12):
        die()
    assert pauses[:3] == [0.0, BEAT_S, 2 * BEAT_S]
    assert pauses[-2:] == [LONGEST_PAUSE_S] * 2
    scene.agent.tell(time.monotonic() + 1e6, 1e6)
    scene.guard.turn()
    die()
    assert pauses[-1] == 0.0


def test_a_guard_without_an_agent_ends_the_run_with_the_lease() -> None:
    scene = Scene(lease_s=0.0)
    scene.agent.close()
    scene.guard.turn()
    scene.guard.watch()
    assert scene.stops == 1


def test_a_guard_leaves_the_end_to_an_agent_that_is_there_and_not_for_ever(monkeypatch) -> None:
    scene = Scene(lease_s=0.0)
    assert not scene.guard.is_over
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + AGENT_S + 1.0)
    scene.guard.watch()
    assert scene.stops == 1


def test_a_guard_stops_again_what_it_could_not_stop_at_once(monkeypatch) -> None:
    scene = Scene(lease_s=0.0)
    scene.agent.close()
    scene.guard.turn()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    answers = iter((False, False, True))
    scene.guard.stop = lambda: next(answers)
    scene.guard.watch()
    assert next(answers, None) is None


def test_an_agent_that_is_frozen_is_killed_and_replaced(monkeypatch) -> None:
    """SIGSTOP to the agent, which on today's hosts ends nothing and answers nobody."""
    scene = Scene(lease_s=1e6)
    with subprocess.Popen(["sleep", "100"]) as agent:
        status = proc.status(agent.pid)
        assert status is not None
        assert scene.guard.link is not None
        scene.guard.link.partner = status.identity
        os.kill(agent.pid, signal.SIGSTOP)
        now = [time.monotonic()]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        for _ in range(int(SILENCE_S) + 2):
            now[0] += 1.0
            scene.agent.hear()
            if scene.guard.link is not None:
                monkeypatch.setattr(links, "BEAT_S", 1.0)
                monkeypatch.setattr("libra_cli.node.agent.lease.guard.BEAT_S", 0.0)
                scene.guard.turn()
        assert agent.wait(5.0) == -signal.SIGKILL
    scene.guard.turn()
    assert len(scene.starts) == 1


def test_a_machine_that_slept_does_not_make_its_agent_frozen(monkeypatch) -> None:
    mine, _ = pair()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600.0)
    assert not mine.is_frozen()


# -- with real processes -------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path, request) -> Iterator[Path]:
    place = tmp_path / "runs" / f"lease-{os.getpid()}-{request.node.name[:30]}" / "n1"
    place.mkdir(parents=True, mode=0o700)
    yield place
    module = [sys.executable, "-m", "libra_cli.node.agent.main", "stop", str(place)]
    subprocess.run(module, check=True, capture_output=True)
    assert marked(place.parent.name) == []


def named(run_dir: Path, name: str) -> set[int]:
    found = Marker.of(run_dir).marked_processes()
    return {one.pid for one, process in found.items() if process == name}


def until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.02)


def start_agent(run_dir: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "libra_cli.node.agent.main", "serve", str(run_dir)],
        env={**os.environ, **Marker.of(run_dir).environment("agent")},
        stderr=subprocess.DEVNULL,
    )


def test_agent_and_guard_start_each_other_again(run_dir) -> None:
    """Either may be killed: the run on the host never has fewer than one holder of its lease."""
    with start_agent(run_dir) as first:
        until(lambda: named(run_dir, "guard"))
        (guard,) = named(run_dir, "guard")
        os.kill(guard, signal.SIGKILL)
        until(lambda: named(run_dir, "guard") - {guard})
        (second,) = named(run_dir, "guard") - {guard}
        until(lambda: (run_dir / "agent.sock").exists())
        first.kill()
    until(lambda: named(run_dir, "agent"))
    assert named(run_dir, "guard") == {second}
