"""The agent with real processes, driven as the controller drives it, over pipes."""
# ruff: noqa: ASYNC110, ASYNC240 - waiting for other processes means looking again, at small files

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from libra_cli.config.errors import HostError, HostLost, ProcessError, WeightsError
from libra_cli.core.events import PublishedVersion
from libra_cli.core.launch.process import PeerAddress
from libra_cli.core.types import WeightVersion
from libra_cli.node.processes import proc
from libra_cli.node.processes.proc import Marker
from libra_cli.node.processes.remains import LOCK
from libra_cli.node.weights import patch
from libra_cli.node.weights.chunks import listed
from libra_cli.node.weights.weight_server import WeightServer
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    Exited,
    HostEvent,
    LeaseExpired,
    Reconnected,
    Rejoined,
)
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.local import LocalTransport, ProcessStream
from libra_cli.runtime.weights.versions import Weights
from tests import credentials
from tests.credentials import LOCAL, TOKEN, credentials_of, told, url_of
from tests.netns import marked

pytestmark = pytest.mark.integration

DEADLINE_S = 30.0
RUN = "test-agent"


class Events:
    """What a host has reported, to wait for."""

    def __init__(self) -> None:
        self.seen: list[HostEvent] = []
        self._news = asyncio.Event()

    def __call__(self, event: HostEvent) -> None:
        self.seen.append(event)
        self._news.set()

    async def first(
        self, kind: type[HostEvent], where: Callable[..., bool] = lambda _: True
    ) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for event in self.seen:
                    if isinstance(event, kind) and where(event):
                        return event
                self._news.clear()
                await self._news.wait()


class GatedTransport(LocalTransport):
    """A way to this machine that can be cut and healed, and that greets like a login script."""

    def __init__(self) -> None:
        self.passable = asyncio.Event()
        self.passable.set()
        self.streams: list[ProcessStream] = []

    async def open_stream(self, argv: Sequence[str]) -> ProcessStream:
        if not self.passable.is_set():
            raise HostLost("local: cut")
        stream = await super().open_stream(["sh", "-c", 'echo "Welcome!"; exec "$@"', "sh", *argv])
        self.streams.append(stream)
        return stream

    async def cut(self) -> None:
        self.passable.clear()
        await self.streams[-1].close()


def cable(host: Host) -> GatedTransport:
    assert isinstance(host.transport, GatedTransport)
    return host.transport


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"{RUN}-{os.getpid()}-{request.node.name[:40]}"
    yield name
    assert marked(name) == [], "a test leaves nothing running"


@asynccontextmanager
async def opened(
    tmp_path: Path, run_id: str, *, name: str = "n1", lease_s: float = 30.0
) -> AsyncIterator[tuple[Host, Events]]:
    host, events = Host(name, GatedTransport(), workdir=str(tmp_path / "work")), Events()
    await host.open(
        run_id,
        token=TOKEN,
        credentials=told(name),
        lease_s=lease_s,
        weights_dir=str(tmp_path / f"weights-{name}"),
        on_event=events,
    )
    try:
        yield host, events
    finally:
        assert await host.shutdown() == ()


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def logged_pids(host: Host, process: str, count: int) -> list[int]:
    """The pids a process has written to its log."""
    async with asyncio.timeout(DEADLINE_S):
        while len(pids := [int(word) for word in (await host.tail(process)).split()]) < count:
            await asyncio.sleep(0.02)
    return pids


def is_alive(pid: int) -> bool:
    status = proc.status(pid)
    return status is not None and status.state not in "ZX"


def play(scene: Coroutine[None, None, None]) -> None:
    asyncio.run(scene)


# -- starting and ending -------------------------------------------------------------------------


def test_an_exit_is_reported_with_its_code_and_the_end_of_its_log(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            started = await host.start("model", python("print('out of luck'); raise SystemExit(7)"))
            event = await events.first(Exited)
            assert event == Exited("n1", "model", started.pid, 7, "out of luck", requested=False)
            assert Path(started.log).read_text() == "out of luck\n"

    play(scene())


def test_the_tail_of_an_exit_holds_nothing_of_an_earlier_life(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            for word in ("first", "second"):
                await host.start("model", python(f"print('{word}')"))
                assert (await events.first(Exited, lambda e, w=word: e.tail == w)).tail == word
            assert await host.tail("model") == "first\nsecond"

    play(scene())


def test_a_program_that_is_missing_is_named(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            with pytest.raises(ProcessError, match=r"n1: server-0: /no/such/program: No such file"):
                await host.start("server-0", ["/no/such/program"])

    play(scene())


def test_starting_the_same_again_changes_nothing_and_another_is_refused(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            first = await host.start("server-0", ["sleep", "100"])
            assert await host.start("server-0", ["sleep", "100"]) == first
            with pytest.raises(ProcessError, match=f"still running as pid {first.pid}"):
                await host.start("server-0", ["sleep", "200"])

    play(scene())


def test_files_are_written_privately_and_only_below_the_run_directory(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            argv = ["sh", "-c", "cat conf/train.json; stat -c %a conf/train.json"]
            await host.start("trainer-0", argv, files={"conf/train.json": '{"a": 1}\n'})
            assert (await events.first(Exited)).tail == '{"a": 1}\n600'
            with pytest.raises(HostError, match="outside the run directory"):
                await host.start("trainer-1", ["true"], files={"../../evil": ""})

    play(scene())


def test_a_process_gets_its_environment_and_reads_the_token_from_a_private_file(
    tmp_path, run_id
) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            source = (
                "import os, libra_cli; p = os.environ['LIBRA_TOKEN_FILE']; "
                "print(open(p).read(), oct(os.stat(p).st_mode)[-3:], os.environ['NCCL_IB_HCA'],"
                " oct(os.stat(os.environ['LIBRA_CREDENTIALS_FILE']).st_mode)[-3:])"
            )
            await host.start("trainer-0", python(source), env={"NCCL_IB_HCA": "mlx5_0"})
            assert (await events.first(Exited)).tail == f"{TOKEN} 600 mlx5_0 600"
            for pid in marked(run_id):
                assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
                assert TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()

    play(scene())


# -- stopping ------------------------------------------------------------------------------------

# A server as vLLM's: its worker ignores TERM, and lives on when the server is killed.
STUBBORN = """
import os, signal, subprocess, sys, time
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
child = subprocess.Popen([sys.executable, "-c", worker], start_new_session={new_session})
time.sleep(0.3)
print(os.getpid(), child.pid)
time.sleep(100)
"""

# A process and a child of it in a session of its own.
APART = ["sh", "-c", "setsid sleep 100 & echo $!; wait"]


@pytest.mark.parametrize("new_session", [False, True])
def test_orphans_are_gone_before_the_exit_of_their_parent_is_reported(
    tmp_path, run_id, new_session
) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            await host.start("server-0", python(STUBBORN.format(new_session=new_session)))
            server, worker = await logged_pids(host, "server-0", 2)
            os.kill(server, signal.SIGKILL)
            event = await events.first(Exited)
            assert (event.exit_code, event.requested) == (-signal.SIGKILL, False)
            assert not is_alive(worker)

    play(scene())


def test_stop_kills_whatever_ignores_the_request_and_says_so(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            await host.start("server-0", python(STUBBORN.format(new_session=True)))
            server, worker = await logged_pids(host, "server-0", 2)
            stopped = await host.stop("server-0", grace_s=0.3)
            assert stopped.stopped
            assert stopped.killed == (worker,)
            assert not is_alive(server)
            assert not is_alive(worker)
            assert (await events.first(Exited)).requested

    play(scene())


def test_a_process_that_is_killed_leaves_no_shared_memory(tmp_path, run_id) -> None:
    source = (
        "import os, signal, time\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=4096)\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "print(os.getpid(), memory.name, flush=True)\n"
        "while True: time.sleep(100)"
    )

    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            await host.start("server-0", python(source))
            async with asyncio.timeout(DEADLINE_S):
                while not (line := await host.tail("server-0")):
                    await asyncio.sleep(0.02)
            pid, name = line.split()
            assert (Path("/dev/shm") / name).exists()
            stopped = await host.stop("server-0", grace_s=0.2)
            assert stopped.stopped
            assert stopped.killed == (int(pid),)
            assert not (Path("/dev/shm") / name).exists()

    play(scene())


def test_what_killed_processes_left_in_tmpdir_and_its_shared_memory_goes_with_the_run(
    tmp_path, run_id
) -> None:
    """As vLLM and torch's launcher do: files, and memory named after the file where ranks meet."""
    name = f"vllm_dist_{uuid4().hex}"
    memory = Path("/dev/shm") / f"{name}-tp-[0-1]-cpushm"
    source = (
        "import os, socket, tempfile, time\n"
        "where = tempfile.mkdtemp(prefix='torchelastic_')\n"
        "socket.socket(socket.AF_UNIX).bind(f'{tempfile.gettempdir()}/socket')\n"
        f"open(f'{{tempfile.gettempdir()}}/{name}', 'w').close()\n"
        f"open({str(memory)!r}, 'w').close()\n"
        "print(os.getpid(), flush=True); time.sleep(100)"
    )
    found: dict[str, set[str]] = {}

    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            own = Path(host.tmp_dir)
            await host.start("server-0", python(source), env={"TMPDIR": host.tmp_dir})
            (pid,) = await logged_pids(host, "server-0", 1)
            os.kill(pid, signal.SIGKILL)
            await events.first(Exited)
            found["left"] = {path.name.partition("_")[0] for path in own.iterdir()}
            assert memory.exists()
            assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert not own.exists()
        assert not memory.exists()
        assert not (Path(host.run_dir) / "tmp").is_symlink()
        async with opened(tmp_path, run_id) as (host, _):
            assert Path(host.tmp_dir).is_dir(), "a run that is resumed has one again"
            assert host.tmp_dir != str(own)

    play(scene())
    assert found["left"] == {"torchelastic", "socket", "vllm", "agent.sock"}


def test_a_child_that_wiped_its_environment_is_stopped_with_its_session(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            await host.start("server-0", ["sh", "-c", "env -i sleep 100 & echo $!; wait"])
            (bare,) = await logged_pids(host, "server-0", 1)
            await until(lambda: Marker(run_id, "n1").process_of(bare) is None)
            assert (await host.stop("server-0")).stopped
            assert not is_alive(bare)

    play(scene())


def test_a_process_that_sets_its_title_keeps_its_marker(tmp_path, run_id) -> None:
    pytest.importorskip("setproctitle", reason="comes with vLLM")
    source = "import os, setproctitle as s; s.setproctitle('VLLM::EngineCore ' + 200 * 'x')"

    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            await host.start(
                "server-0", python(f"{source}; print(os.getpid()); import time; time.sleep(100)")
            )
            (pid,) = await logged_pids(host, "server-0", 1)
            assert Marker(run_id, "n1").process_of(pid) == "server-0"

    play(scene())


def test_nothing_without_the_marker_is_ever_signalled(tmp_path, run_id) -> None:
    own = Marker(run_id, "n1").environment("server-0")
    strangers = [
        subprocess.Popen(["sleep", "100"], env={**os.environ, **own, **other})
        for other in (
            {"LIBRA_RUN": f"{run_id}-2"},
            {"LIBRA_NODE": "n2"},
            dict.fromkeys(own, ""),
        )
    ]

    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            await host.start("server-0", ["sleep", "100"])
            assert (await host.stop("server-0")).stopped

    try:
        play(scene())
        assert all(stranger.poll() is None for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


# -- the lease and the line ----------------------------------------------------------------------


def test_when_the_lease_is_over_everything_stops_and_the_agent_ends(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id, lease_s=1.0) as (host, _):
            await host.start("server-0", APART)
            await logged_pids(host, "server-0", 1)
            await until(lambda: len(marked(run_id)) == 4)  # with agent and guard
            await host.close()
            await until(lambda: not marked(run_id))
            assert not (tmp_path / "weights-n1" / run_id).exists()
            await until(lambda: not Path(host.tmp_dir).exists())

    play(scene())


def test_a_controller_that_comes_while_an_agent_ends_waits_for_the_next(tmp_path, run_id) -> None:
    """One that ends holds the lock until everything is stopped, and listens no more."""
    run_dir = tmp_path / "work" / "runs" / run_id / "n1"
    run_dir.mkdir(mode=0o700, parents=True)

    async def scene() -> None:
        async def end() -> None:
            await until(lambda: marked(run_id))
            await until(lambda: not marked(run_id))  # the first that was started has gone
            lock.close()

        ending = asyncio.create_task(end())
        async with opened(tmp_path, run_id) as (host, _):
            await ending
            assert await host.processes() == []

    with open(run_dir / LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        play(scene())


def test_a_controller_that_comes_as_the_lease_ends_waits_for_the_next_agent(
    tmp_path, run_id
) -> None:
    """An agent that ends stops all of the run, also the agent that is started in its place."""
    slow = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), exit()))"
    log = tmp_path / "work" / "runs" / run_id / "n1" / "agent.log"

    async def scene() -> None:
        async with opened(tmp_path, run_id, lease_s=1.0) as (host, _):
            await host.start("server-0", python(f"{slow}; print(1, flush=True); time.sleep(100)"))
            await logged_pids(host, "server-0", 1)
            await host.close()
            await until(lambda: "stopping everything" in log.read_text())
            async with opened(tmp_path, run_id) as (next_one, _):
                assert await next_one.processes() == []
                assert Path(next_one.tmp_dir, "agent.sock").exists()

    play(scene())


def test_a_short_lease_is_kept_by_a_quicker_pulse(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id, lease_s=2.0) as (host, events):
            await host.start("model", ["sleep", "3"])
            assert (await events.first(Exited)).exit_code == 0
            assert [type(event) for event in events.seen] == [Exited]

    play(scene())


def test_a_controller_that_comes_back_within_the_lease_finds_the_same_processes(
    tmp_path, run_id
) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            started = await host.start("server-0", ["sleep", "100"])
            await cable(host).cut()
            lost = await events.first(ConnectionLost)
            assert "hung up" in lost.reason
            cable(host).passable.set()
            await events.first(Reconnected)
            (row,) = await host.processes()
            assert (row.pid, row.started, row.state) == (started.pid, started.started, "running")

    play(scene())


def test_a_second_controller_takes_over_from_the_first(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (first, events):
            started = await first.start("server-0", ["sleep", "100"])
            cable(first).passable.clear()
            async with opened(tmp_path, run_id) as (second, _):
                await events.first(ConnectionLost)
                assert [row.pid for row in await second.processes()] == [started.pid]
            # The second one has ended the run; a new agent welcomes the first.
            cable(first).passable.set()
            await events.first(Rejoined)
            assert [type(one) for one in events.seen] == [ConnectionLost, LeaseExpired, Rejoined]
            assert await first.processes() == []

    play(scene())


def test_a_controller_with_another_token_is_refused(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            intruder = Host("n1", LocalTransport(), workdir=host.workdir)
            with pytest.raises(HostError, match="another token"):
                await intruder.open(
                    run_id, token="x", lease_s=5, weights_dir="/nowhere", on_event=print
                )

    play(scene())


def test_an_exit_while_nobody_listens_is_reported_once_when_the_line_is_back(
    tmp_path, run_id
) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            started = await host.start("server-0", ["sleep", "100"])
            await cable(host).cut()
            await events.first(ConnectionLost)
            os.kill(started.pid, signal.SIGKILL)
            await until(lambda: proc.status(started.pid) is None)
            cable(host).passable.set()
            await events.first(Exited)
            assert [type(event) for event in events.seen] == [ConnectionLost, Reconnected, Exited]
            await host.processes()
            assert len(events.seen) == 3

    play(scene())


def test_a_request_waits_for_the_line_to_come_back(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            await cable(host).cut()
            await events.first(ConnectionLost)
            request = asyncio.create_task(host.start("server-0", ["sleep", "100"]))
            await asyncio.sleep(0)
            cable(host).passable.set()
            started = await request
            assert [row.pid for row in await host.processes()] == [started.pid]

    play(scene())


def test_a_host_that_does_not_come_back_is_given_up(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id, lease_s=1.0) as (host, events):
            await cable(host).cut()
            request = asyncio.create_task(host.processes())
            gone = await events.first(LeaseExpired)
            assert "cut" in gone.reason
            with pytest.raises(HostLost, match="given up"):
                await request
            with pytest.raises(HostLost, match="given up"):
                await host.processes()
            await until(lambda: not marked(run_id))

    play(scene())


def test_a_cancelled_request_leaves_the_line_in_order(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            await host.start("server-0", python(STUBBORN.format(new_session=False)))
            await logged_pids(host, "server-0", 2)
            stop = asyncio.create_task(host.stop("server-0", grace_s=0.5))
            await asyncio.sleep(0.05)
            stop.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stop
            assert (await host.stop("server-0", grace_s=0.5)).stopped

    play(scene())


def test_the_successor_of_a_killed_agent_takes_its_processes_over(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            started = await host.start("server-0", ["sleep", "100"])
            marker = Marker(run_id, "n1")
            (agent,) = [pid for pid in marked(run_id) if marker.process_of(pid) == "agent"]
            os.kill(agent, signal.SIGKILL)
            await events.first(Reconnected)
            (row,) = await host.processes()
            assert (row.pid, row.state) == (started.pid, "running")
            os.kill(started.pid, signal.SIGTERM)
            event = await events.first(Exited)
            assert (event.pid, event.exit_code) == (started.pid, None)

    play(scene())


def test_a_run_ends_with_its_lease_when_controller_and_agent_are_dead(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id, lease_s=2.0) as (host, _):
            await host.start("server-0", APART)
            await logged_pids(host, "server-0", 1)
            await host.close()
            marker = Marker(run_id, "n1")
            (agent,) = [pid for pid in marked(run_id) if marker.process_of(pid) == "agent"]
            os.kill(agent, signal.SIGKILL)
            await until(lambda: not marked(run_id))

    play(scene())


def test_the_successor_of_a_killed_agent_refuses_another_token(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, events):
            await host.start("server-0", ["sleep", "100"])
            marker = Marker(run_id, "n1")
            (agent,) = [pid for pid in marked(run_id) if marker.process_of(pid) == "agent"]
            cable(host).passable.clear()
            os.kill(agent, signal.SIGKILL)
            await events.first(ConnectionLost)
            intruder = Host("n1", LocalTransport(), workdir=host.workdir)
            with pytest.raises(HostError, match="another token"):
                await intruder.open(
                    run_id, token="x", lease_s=5, weights_dir="/nowhere", on_event=print
                )
            cable(host).passable.set()
            await events.first(Reconnected)

    play(scene())


def test_the_remains_of_a_run_are_stopped_without_its_agent(tmp_path, run_id) -> None:
    async def scene() -> None:
        host = Host("n1", LocalTransport(), workdir=str(tmp_path / "work"))
        weights = tmp_path / "weights"
        await host.open(
            run_id, token=TOKEN, lease_s=60, weights_dir=str(weights), on_event=lambda _: None
        )
        await host.start("server-0", APART)
        await logged_pids(host, "server-0", 1)
        await host.close()
        marker = Marker(run_id, "n1")
        (agent,) = [pid for pid in marked(run_id) if marker.process_of(pid) == "agent"]
        os.kill(agent, signal.SIGKILL)
        again = Host("n1", LocalTransport(), workdir=str(tmp_path / "work"))
        assert await again.stop_remains(run_id) == ()
        assert marked(run_id) == []
        assert not (weights / run_id).exists()

    play(scene())


def test_a_host_without_the_python_says_how_to_get_one(tmp_path) -> None:
    async def scene(interpreter: str) -> None:
        host = Host("n1", LocalTransport(), workdir=str(tmp_path), python=interpreter)
        await host.open("r", token="t", lease_s=5, weights_dir="/nowhere", on_event=print)

    with pytest.raises(HostError, match="no Python that runs") as missing:
        play(scene(str(tmp_path / "venv/bin/python")))
    assert "libra setup" in missing.value.hint
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\necho '[3, 9]'\n")
    old.chmod(0o700)
    with pytest.raises(HostError, match=r"is Python 3\.9; libra needs 3\.11"):
        play(scene(str(old)))


def test_the_agent_needs_nothing_but_the_standard_library() -> None:
    source = "import sys, libra_cli.node.agent.main; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {source}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) - set(sys.stdlib_module_names) == {"libra_cli", "__main__"}


# -- ports ---------------------------------------------------------------------------------------


def test_a_port_is_given_out_only_once_and_never_if_taken(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with (
            opened(tmp_path, run_id, name="n1") as (one, _),
            opened(tmp_path, run_id, name="n2") as (other, _),
        ):
            with socket.create_server(("127.0.0.1", 0)) as server:
                taken = server.getsockname()[1]
                first, last = taken - 20, taken + 20
                theirs = await one.ports(first, last, 10, taken=[first])
                ours = await other.ports(first, last, 10)
            assert len({taken, *theirs, *ours}) == 21
            assert first not in theirs
            with socket.create_server(("127.0.0.1", ours[0]), reuse_port=True):  # for a server
                pass

    play(scene())


def test_too_few_free_ports_are_an_error_that_gives_nothing_out(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            (port,) = await host.ports(20000, 30000, 1)
            with pytest.raises(HostError, match=f"2 free ports wanted, 0 in {port}-{port}"):
                await host.ports(port, port, 2)

    play(scene())


# -- weight versions -----------------------------------------------------------------------------


def publish(root: Path, name: str, files: dict[str, bytes]) -> None:
    version = root / name
    version.mkdir(parents=True)
    for file, data in files.items():
        (version / file).write_bytes(data)
    listing = {file: entry(version / file) for file in files}
    (version / "manifest.json").write_text(json.dumps({"name": name, "files": listing}))


def entry(path: Path) -> dict[str, object]:
    """What a manifest says of a file."""
    found = listed(path, "sha256")
    return {"bytes": found.bytes, "sha256": found.digests}


def versions_in(root: Path) -> list[str]:
    """What a host has whole, and would let servers load."""
    return sorted(one.name for one in root.iterdir() if not one.name.startswith("."))


WEIGHTS = {"model-1.safetensors": os.urandom(3_000_000), "model-2.safetensors": b"small"}


@asynccontextmanager
async def peers(tmp_path: Path, run_id: str) -> AsyncIterator[tuple[Host, Host, str, Path, Path]]:
    """Two hosts, the first with a version ``v000001-e0``, and where it serves it."""
    async with (
        opened(tmp_path, run_id, name="n1") as (giver, _),
        opened(tmp_path, run_id, name="n2") as (taker, _),
    ):
        here, there = tmp_path / "weights-n1" / run_id, tmp_path / "weights-n2" / run_id
        publish(here, "v000001-e0", WEIGHTS)
        source = url_of(await giver.serve_weights("127.0.0.1"), giver.name)
        yield giver, taker, source, here, there


def test_a_version_arrives_whole_and_is_served_on(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (giver, taker, source, here, there):
            pulled = await taker.pull("v000001-e0", ["http://127.0.0.1:1", source])
            assert pulled.path == str(there / "v000001-e0")
            assert pulled.sent_by == {
                "http://127.0.0.1:1": 0,
                source: sum(map(len, WEIGHTS.values())),
            }
            assert (pulled.kind, pulled.detail) == ("full", "")
            for file in (here / "v000001-e0").iterdir():
                assert (there / "v000001-e0" / file.name).read_bytes() == file.read_bytes()
            again = await taker.pull("v000001-e0", [source])
            assert (again.kind, again.sent_bytes) == ("local", 0)
            onward = url_of(await taker.serve_weights("127.0.0.1"), taker.name)
            assert await giver.forget([]) == ["v000001-e0"]
            assert (await giver.pull("v000001-e0", [onward])).sent_by[onward] > 0
            assert there.stat().st_mode & 0o777 == 0o700

    play(scene())


def test_a_version_that_is_damaged_everywhere_is_refused(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (_, taker, source, here, there):
            publish(here, "v000002-e0", WEIGHTS)
            with (here / "v000002-e0" / "model-1.safetensors").open("r+b") as file:
                file.write(b"XX")
            with pytest.raises(WeightsError, match=r"v000002-e0: .*model-1.safetensors is damaged"):
                await taker.pull("v000002-e0", [source])
            assert versions_in(there) == []
            assert (await taker.pull("v000001-e0", [source])).kind == "full"
            with pytest.raises(WeightsError, match=r"v000009-e0: .*manifest\.json: HTTP 404"):
                await taker.pull("v000009-e0", [source])

    play(scene())


@pytest.mark.parametrize("name", ["../../evil", ".hidden", "a/b", "/etc/passwd", "manifest.json"])
def test_a_manifest_cannot_place_files_elsewhere(tmp_path, run_id, name) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (_, taker, source, here, there):
            listing = {"files": {name: {"bytes": 0, "sha256": []}}}
            (here / "v000001-e0" / "manifest.json").write_text(json.dumps(listing))
            with pytest.raises(WeightsError, match="no plain file name"):
                await taker.pull("v000001-e0", [source])
            assert list(there.iterdir()) == []

    play(scene())


def test_only_files_of_versions_are_served_and_only_for_the_token(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (_, _, source, here, _):
            (here / "v000001-e0" / "link").symlink_to("/etc/passwd")
            (here / "secret").write_text("not a version")
            good = f"Bearer {TOKEN}"

            def status(path: str, token: str = good) -> int:
                return credentials.ask(source, path, headers={"Authorization": token})[0]

            def check() -> None:
                assert status("/v000001-e0/manifest.json") == 200
                for token in ("", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", "Bearer \xe9"):
                    assert status("/v000001-e0/manifest.json", token) == 401
                for path in (
                    "/",
                    "/secret",
                    "/v000001-e0",
                    "/v000001-e0/",
                    "/v000001-e0/link",
                    "/v000001-e0/../secret",
                    "/../../../etc/passwd",
                    "/v000001-e0/%2e%2e/secret",
                    "//etc/passwd",
                ):
                    assert status(path) == 404, path

            await asyncio.to_thread(check)

    play(scene())


CHANGED = dict(WEIGHTS)
CHANGED["model-1.safetensors"] = bytes(
    byte ^ (index % 1000 == 0) for index, byte in enumerate(WEIGHTS["model-1.safetensors"])
)


def publish_delta(root: Path, name: str, base: str, files: dict[str, bytes]) -> None:
    """Like ``publish``, with what makes each file of the one in ``base`` beside it."""
    publish(root, name, files)
    listing = {}
    for file in files:
        old, new = root / base / file, root / name / file
        delta = new.with_name(f"{file}.delta")
        assert patch.encode(old, new, delta, word_bytes=1, limit=10**6, within_s=DEADLINE_S)
        listing[delta.name] = entry(delta)
    manifest = json.loads((root / name / "manifest.json").read_text())
    manifest["delta"] = {"base": base, "files": listing}
    (root / name / "manifest.json").write_text(json.dumps(manifest))


def same_files(one: Path, other: Path) -> bool:
    contents = [
        {file.name: file.read_bytes() for file in where.iterdir()} for where in (one, other)
    ]
    return contents[0] == contents[1]


def test_a_host_with_the_version_before_is_sent_what_changed_and_serves_it_on(
    tmp_path, run_id
) -> None:
    async def scene() -> None:
        async with (
            peers(tmp_path, run_id) as (_, taker, source, here, there),
            opened(tmp_path, run_id, name="n3") as (third, _),
        ):
            publish_delta(here, "v000002-e0", "v000001-e0", CHANGED)
            await taker.pull("v000001-e0", [source])
            await third.pull("v000001-e0", [source])
            pulled = await taker.pull("v000002-e0", [source])
            assert (pulled.kind, pulled.detail) == ("delta", "")
            assert 0 < pulled.sent_bytes < 0.01 * sum(map(len, CHANGED.values()))
            assert same_files(there / "v000002-e0", here / "v000002-e0")
            onward = url_of(await taker.serve_weights("127.0.0.1"), taker.name)
            passed_on = await third.pull("v000002-e0", [onward, source])
            assert passed_on.kind == "delta"
            assert passed_on.sent_bytes == pulled.sent_bytes

    play(scene())


def test_a_host_that_is_further_behind_gets_a_full_copy(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (_, taker, source, here, there):
            publish_delta(here, "v000002-e0", "v000001-e0", CHANGED)
            publish_delta(here, "v000003-e0", "v000002-e0", WEIGHTS)
            await taker.pull("v000001-e0", [source])
            pulled = await taker.pull("v000003-e0", [source])
            assert (pulled.kind, pulled.detail) == ("full", "")
            assert pulled.sent_bytes == sum(map(len, WEIGHTS.values()))
            files = {file.name for file in (there / "v000003-e0").iterdir()}
            assert files == {*WEIGHTS, "manifest.json"}

    play(scene())


def _bit_flipped(delta: Path) -> None:
    data = bytearray(delta.read_bytes())
    data[-1] ^= 1
    delta.write_bytes(data)


def _of_another_base(delta: Path) -> None:
    """Whole, and what the manifest says, yet it does not make the files it should."""
    base, new = delta.parent / "base", delta.parent / "new"
    base.write_bytes(os.urandom(3_000_000))
    new.write_bytes(base.read_bytes()[:-1] + b"!")
    assert patch.encode(base, new, delta, word_bytes=1, limit=10**6, within_s=DEADLINE_S)
    _state(delta)


def _no_delta_at_all(delta: Path) -> None:
    delta.write_bytes(b"nonsense")
    _state(delta)


def _state(delta: Path) -> None:
    path = delta.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["delta"]["files"][delta.name] = entry(delta)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_bit_flipped, r"model-1\.safetensors\.delta is damaged"),
        (_of_another_base, r"model-1\.safetensors is damaged"),
        (_no_delta_at_all, r"nothing was rebuilt: .*ends too early"),
        (Path.unlink, r"no source has the rest, 1 of 2 chunks are here"),
    ],
)
def test_a_delta_that_is_of_no_use_ends_in_a_full_copy_and_a_line_in_the_log(
    tmp_path, run_id, damage, reason
) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (_, taker, source, here, there):
            publish_delta(here, "v000002-e0", "v000001-e0", CHANGED)
            damage(here / "v000002-e0" / "model-1.safetensors.delta")
            await taker.pull("v000001-e0", [source])
            pulled = await taker.pull("v000002-e0", [source])
            assert pulled.kind == "full"
            assert re.search(reason, pulled.detail)
            for file, data in CHANGED.items():
                assert (there / "v000002-e0" / file).read_bytes() == data
            assert not list((there / "v000002-e0").glob("*.delta"))
            log = (Path(taker.run_dir) / "agent.log").read_text()
            assert "a full copy, since by delta" in log

    play(scene())


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exec sleep 60", "timed out"),
        ("echo no numpy >&2; exit 1", "nothing was rebuilt: no numpy"),
    ],
)
def test_a_process_that_does_not_rebuild_in_time_or_at_all_ends_in_a_full_copy(
    tmp_path, run_id, monkeypatch, script, reason
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)

    async def scene() -> None:
        async with peers(tmp_path, run_id) as (_, _, source, here, _):
            publish_delta(here, "v000002-e0", "v000001-e0", CHANGED)
            taker = WeightServer(tmp_path / "taker" / "run", credentials_of("taker"))
            await asyncio.to_thread(taker.pull, "v000001-e0", [source], DEADLINE_S)
            with monkeypatch.context() as patched:
                patched.setattr(sys, "executable", str(python))
                pulled = await asyncio.to_thread(taker.pull, "v000002-e0", [source], 4.0)
            assert pulled.kind == "full"
            assert reason in pulled.detail
            for file, data in CHANGED.items():
                assert (taker.root / "v000002-e0" / file).read_bytes() == data

    play(scene())


def test_a_base_that_is_damaged_here_ends_in_a_full_copy(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (_, taker, source, here, there):
            publish_delta(here, "v000002-e0", "v000001-e0", CHANGED)
            await taker.pull("v000001-e0", [source])
            (there / "v000001-e0" / "model-1.safetensors").write_bytes(b"cut off")
            pulled = await taker.pull("v000002-e0", [source])
            assert pulled.kind == "full"
            assert "is no delta of" in pulled.detail
            for file, data in CHANGED.items():
                assert (there / "v000002-e0" / file).read_bytes() == data

    play(scene())


@pytest.mark.parametrize(
    "delta", [{"base": "../x", "files": {}}, {"base": "v000001-e0", "files": {"../x": {}}}, [], 7]
)
def test_a_manifest_cannot_rebuild_files_elsewhere(tmp_path, run_id, delta) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (_, taker, source, here, there):
            manifest = here / "v000001-e0" / "manifest.json"
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "delta": delta}))
            with pytest.raises(WeightsError, match=r"no plain file name|json is damaged"):
                await taker.pull("v000001-e0", [source])
            assert list(there.iterdir()) == []

    play(scene())


def test_only_the_server_that_asked_for_the_pull_is_told_that_bytes_travelled(
    tmp_path, run_id
) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (giver, taker, _, here, there):
            weights = Weights(
                {"n1": giver, "n2": taker},
                dict.fromkeys(("n1", "n2"), PeerAddress(LOCAL, LOCAL)),
                {"n1": str(here), "n2": str(there)},
                {"n1": 0, "n2": 0},
                origin="n1",
                keep=2,
                timeout_s=DEADLINE_S,
            )
            size = sum(map(len, WEIGHTS.values()))
            first = PublishedVersion(WeightVersion(0, 1), size, 0.0)
            one, other = await asyncio.gather(weights.on("n2", first), weights.on("n2", first))
            assert (one.kind, other.kind) == ("full", "local")
            assert one.sent_bytes == size
            assert other.sent_bytes == 0
            assert one.directory == other.directory == str(there / "v000001-e0")
            assert (await weights.on("n1", first)).kind == "local"
            publish_delta(here, "v000002-e0", "v000001-e0", CHANGED)
            place = await weights.on("n2", PublishedVersion(WeightVersion(0, 2), size, 0.0))
            assert place.kind == "delta"
            assert 0 < place.sent_bytes < 0.01 * size

    play(scene())


def test_a_pull_that_takes_too_long_says_how_far_it_came(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (_, taker, source, _, there):
            said = r"nothing came for \d+ s, 0 of \d chunks are here"
            with pytest.raises(WeightsError, match=said):
                await taker.pull("v000001-e0", [source], timeout_s=0.0)
            assert list(there.iterdir()) == []

    play(scene())


def test_forgetting_keeps_what_is_named(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with peers(tmp_path, run_id) as (giver, _, _, here, _):
            publish(here, "v000002-e0", {"a": b""})
            publish(here, "v000003-e0", {"a": b""})
            assert await giver.forget(["v000002-e0", "v000007-e0"]) == ["v000001-e0", "v000003-e0"]
            assert [one.name for one in here.iterdir()] == ["v000002-e0"]

    play(scene())


# -- facts ---------------------------------------------------------------------------------------


def test_facts_are_those_of_this_machine(tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(tmp_path, run_id) as (host, _):
            here = str(tmp_path)
            found = await host.facts(["127.0.0.1"], packages=["json", "nope"], paths=[here, "/no"])
            assert found.hostname == socket.gethostname()
            assert found.cpus == len(os.sched_getaffinity(0))
            assert found.mem_total >= found.mem_free > 0
            assert (found.interface, found.address) == ("lo", "127.0.0.1")
            assert (dict(found.packages), found.paths) == ({"json": ""}, (here,))
            assert found.routes[0].target == "127.0.0.1"
            assert any("127.0.0.1" in one.addresses for one in found.interfaces)
            assert abs(found.clock - time.time()) < DEADLINE_S

    play(scene())
