"""Hosts as they are in life: real sshds with their own networks, cables that are pulled, and a
controller that dies."""
# ruff: noqa: ASYNC110, ASYNC240 - waiting for other processes means looking again, at small files

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from libra_cli.config.errors import HostError, HostKeyError
from libra_cli.node.weights.chunks import listed
from libra_cli.runtime.credentials.authority import peer_url
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    Exited,
    HostEvent,
    LeaseExpired,
    Reconnected,
)
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.ssh import SshTransport
from tests.credentials import TOKEN, told
from tests.netns import Network, marked, missing, network

DEADLINE_S = 25.0
PULSE_S = 1.0
"""Where a cable is pulled: that is noticed after three beats. A busy machine may miss one."""
WEIGHTS_DIR = "/dev/shm/libra-test"
SHARED_BYTES, SHARED_GBIT_S = 100_000_000, 0.5
"""Two copies over one such link take 3.2 s."""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(90),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

WEB_SERVER = """
import http.server, os, socketserver, sys, time

class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if data == b"slow":
            time.sleep(60)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

if os.path.exists(sys.argv[1]):
    os.unlink(sys.argv[1])
socketserver.ThreadingUnixStreamServer.request_queue_size = 100
socketserver.ThreadingUnixStreamServer(sys.argv[1], Echo).serve_forever()
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(3, tmp_path_factory.mktemp("net")) as hosts:
        yield hosts
        for host in hosts.hosts:
            hosts.heal(host)


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"test-hosts-{os.getpid()}-{request.node.name[:40]}"
    yield name
    assert marked(name) == [], "a test leaves nothing running on any host"


class Events(list[HostEvent]):
    """What hosts have reported, to wait for."""

    async def first(self, kind: type[HostEvent]) -> Any:
        await until(lambda: any(isinstance(event, kind) for event in self))
        return next(event for event in self if isinstance(event, kind))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def opened(
    net: Network,
    index: int,
    tmp_path: Path,
    run_id: str,
    *,
    lease_s: float = 30.0,
    ping_interval_s: float = 5.0,
) -> AsyncIterator[tuple[Host, Events]]:
    place, events = net.hosts[index], Events()
    transport = SshTransport(place.address, config=net.config)
    workdir = str(tmp_path / place.name)
    host = Host(
        place.name,
        transport,
        workdir=workdir,
        python=sys.executable,
        ping_interval_s=ping_interval_s,
    )
    await host.open(
        run_id,
        token=TOKEN,
        credentials=told(host.name),
        lease_s=lease_s,
        weights_dir=WEIGHTS_DIR,
        on_event=events.append,
    )
    try:
        yield host, events
    finally:
        assert await host.shutdown() == ()


async def serve(host: Host) -> str:
    path = f"{host.tmp_dir}/server-0.sock"
    await host.start("server-0", [sys.executable, "-c", WEB_SERVER, path])
    return path


@asynccontextmanager
async def client(
    host: Host, path: str
) -> AsyncIterator[Callable[[bytes], Coroutine[Any, Any, bytes]]]:
    """A way to post to a server on the host."""
    endpoint = await host.dial(path)
    connector = aiohttp.UnixConnector(path=endpoint.path, limit=0)
    async with aiohttp.ClientSession("http://host", connector=connector) as session:

        async def post(data: bytes) -> bytes:
            async with session.post("/", data=data) as response:
                return await response.read()

        yield post


async def answers(post: Callable[[bytes], Coroutine[Any, Any, bytes]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                assert await post(b"there?") == b"there?"
                return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.02)


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_a_host_tells_what_it_is_and_runs_our_code(net, tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(net, 0, tmp_path, run_id) as (host, events):
            facts = await host.facts([net.hosts[1].address])
            assert (facts.address, facts.interface) == (net.hosts[0].address, "eth0")
            source = "import libra_cli, os; print(libra_cli.__file__, os.environ['LIBRA_NODE'])"
            started = await host.start("model", [sys.executable, "-c", source])
            event = await events.first(Exited)
            assert event.tail == f"{host.code_dir}/libra_cli/__init__.py host-1"
            assert (event.pid, event.exit_code) == (started.pid, 0)

    play(scene())


def test_a_pulled_cable_costs_nothing_but_time(net, tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(net, 0, tmp_path, run_id, ping_interval_s=PULSE_S) as (host, events):
            path = await serve(host)
            before = await host.processes()
            async with client(host, path) as post:
                await answers(post)
                net.cut(net.hosts[0])
                lost = await events.first(ConnectionLost)
                assert "nothing heard" in lost.reason
                request = asyncio.create_task(host.processes())
                with pytest.raises(aiohttp.ClientConnectionError):
                    await post(b"nobody there")
                net.heal(net.hosts[0])
                await events.first(Reconnected)
                assert await request == before
                await answers(post)
            assert [type(event) for event in events] == [ConnectionLost, Reconnected]

    play(scene())


def test_a_request_in_flight_when_the_cable_is_pulled_fails_instead_of_hanging(
    net, tmp_path, run_id
) -> None:
    async def scene() -> None:
        async with (
            opened(net, 0, tmp_path, run_id, ping_interval_s=PULSE_S) as (host, events),
            client(host, await serve(host)) as post,
        ):
            await answers(post)
            request = asyncio.create_task(post(b"slow"))
            await asyncio.sleep(0.1)
            net.cut(net.hosts[0])
            await events.first(ConnectionLost)
            with pytest.raises(aiohttp.ClientConnectionError):
                await request
            net.heal(net.hosts[0])
            await events.first(Reconnected)

    play(scene())


def test_an_exit_behind_a_pulled_cable_is_heard_of_later(net, tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(net, 0, tmp_path, run_id, ping_interval_s=PULSE_S) as (host, events):
            started = await host.start("server-0", ["sh", "-c", "echo bye; sleep 5; exit 5"])
            net.cut(net.hosts[0])
            await events.first(ConnectionLost)
            await until(lambda: len(marked(run_id)) == 2)  # agent and guard are all there is
            net.heal(net.hosts[0])
            event = await events.first(Exited)
            assert (event.pid, event.exit_code, event.tail) == (started.pid, 5, "bye")

    play(scene())


def test_a_host_cut_off_for_longer_than_the_lease_stops_everything_by_itself(
    net, tmp_path, run_id
) -> None:
    async def scene() -> None:
        async with opened(net, 0, tmp_path, run_id, ping_interval_s=PULSE_S, lease_s=6.0) as (
            host,
            events,
        ):
            await host.start("server-0", ["sh", "-c", "setsid sleep 100 & wait"])
            net.cut(net.hosts[0])
            gone = await events.first(LeaseExpired)
            assert net.hosts[0].address in gone.reason
            await until(lambda: not marked(run_id))

    try:
        with pytest.raises(HostError, match=r"its lease (ends|has ended) what runs there at"):
            play(scene())
    finally:
        net.heal(net.hosts[0])


CONTROLLER = """
import asyncio, sys
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.ssh import SshTransport

async def main(address, config, workdir, run_id):
    host = Host("host-1", SshTransport(address, config=config), workdir=workdir,
                python=sys.executable)
    await host.open(run_id, token="t", lease_s=4.0, weights_dir="/dev/shm/x", on_event=print)
    await host.start("server-0", ["sh", "-c", "setsid sleep 100 & wait"])
    print("running", flush=True)
    await asyncio.sleep(100)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_controller_that_is_killed_leaves_nothing_behind(net, tmp_path, run_id) -> None:
    argv = [sys.executable, "-c", CONTROLLER, net.hosts[0].address, net.config, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([*argv, run_id], stdout=subprocess.PIPE, env=environment) as controller:
        try:
            assert controller.stdout is not None
            assert controller.stdout.readline() == b"running\n"
            # Two of the server, of which the second may be on its way, agent and guard.
            play(until(lambda: len(marked(run_id)) == 4))
        finally:
            controller.send_signal(signal.SIGKILL)
    play(until(lambda: not marked(run_id)))


def test_a_host_behind_a_jump_host_is_reached_through_it(net, tmp_path, run_id) -> None:
    jump, far = net.hosts[0], net.hosts[1]
    (Path(net.home) / "jump_config").write_text(
        f"Host far\n  HostName {far.address}\n  ProxyJump near\nHost near\n"
        f"  HostName {jump.address}\nHost *\n  IdentityFile {net.identity}\n"
        f"  UserKnownHostsFile {net.known_hosts}\n"
    )

    async def scene() -> None:
        transport = SshTransport("far", config=str(net.home / "jump_config"))
        host = Host("far", transport, workdir=str(tmp_path), python=sys.executable)
        await host.open(run_id, token="t", lease_s=20, weights_dir=WEIGHTS_DIR, on_event=print)
        done = await transport.run(["printenv", "SSH_CONNECTION"], timeout_s=DEADLINE_S)
        source, _, target, _ = done.stdout.decode().split()
        assert (source, target) == (jump.address, far.address)
        async with client(host, await serve(host)) as post:
            await answers(post)
        assert await host.shutdown() == ()

    play(scene())


def test_hosts_have_ports_of_their_own_and_pass_weights_to_each_other(
    net, tmp_path, run_id
) -> None:
    data = os.urandom(5_000_000)

    async def scene() -> None:
        async with (
            opened(net, 0, tmp_path, run_id) as (one, _),
            opened(net, 1, tmp_path, run_id) as (other, _),
        ):
            # Not the ports of the other tests: what they closed is not free for a minute.
            assert await one.ports(22000, 22999, 2) == await other.ports(22000, 22999, 2)
            (tmp_path / "model.bin").write_bytes(data)
            entry = listed(tmp_path / "model.bin", "sha256")
            manifest = {"files": {"model.bin": {"bytes": entry.bytes, "sha256": entry.digests}}}
            files = {"model.bin": data, "manifest.json": json.dumps(manifest).encode()}
            await one.transport.put_tree(files, f"{WEIGHTS_DIR}/{run_id}/v000001-e0")
            address = net.hosts[0].address
            source = peer_url(address, await one.serve_weights(address), one.name)
            pulled = await other.pull("v000001-e0", [source])
            assert (pulled.kind, pulled.sent_by) == ("full", {source: len(data)})
            assert await other.transport.get(f"{pulled.path}/model.bin") == data

    play(scene())


def test_hosts_that_pull_at_the_same_time_do_not_each_wait_for_the_publishers_link(
    net, tmp_path, run_id
) -> None:
    data = os.urandom(SHARED_BYTES)
    (tmp_path / "model.bin").write_bytes(data)
    entry = listed(tmp_path / "model.bin", "sha256")
    manifest = {"files": {"model.bin": {"bytes": entry.bytes, "sha256": entry.digests}}}
    files = {"model.bin": data, "manifest.json": json.dumps(manifest).encode()}

    async def scene() -> None:
        async with (
            opened(net, 0, tmp_path, run_id) as (trainer, _),
            opened(net, 1, tmp_path, run_id) as (one, _),
            opened(net, 2, tmp_path, run_id) as (other, _),
        ):
            await trainer.transport.put_tree(files, f"{WEIGHTS_DIR}/{run_id}/v000001-e0")
            places = zip(net.hosts, (trainer, one, other), strict=True)
            source, first, second = [
                peer_url(place.address, await host.serve_weights(place.address), host.name)
                for place, host in places
            ]
            net.shape(SHARED_GBIT_S)
            results = await asyncio.gather(
                one.pull("v000001-e0", [second, source]), other.pull("v000001-e0", [first, source])
            )
            net.shape(0)
            for host, pulled in zip((one, other), results, strict=True):
                assert await host.transport.get(f"{pulled.path}/model.bin") == data
            assert sum(pulled.sent_by[source] for pulled in results) < 1.7 * len(data)
            assert sum(pulled.sent_bytes for pulled in results) < 2.3 * len(data)

    try:
        play(scene())
    finally:
        net.shape(0)


def test_many_connections_to_a_host_take_no_thread_each(net, tmp_path, run_id) -> None:
    async def scene() -> None:
        async with (
            opened(net, 0, tmp_path, run_id) as (host, _),
            client(host, await serve(host)) as post,
        ):
            await answers(post)
            for turn in range(10):
                bodies = [f"{turn} {number}".encode() for number in range(30)]
                assert await asyncio.gather(*map(post, bodies)) == bodies
            # At most 8 of the transport, one of paramiko's, and the default executor's.
            assert threading.active_count() < 20

    play(scene())


def test_a_host_that_is_not_there_or_not_itself_is_told_apart(net, tmp_path) -> None:
    place = net.hosts[2]

    async def failure(config: str) -> HostError:
        transport = SshTransport(place.address, config=config)
        try:
            await transport.connect(timeout_s=5.0)
        except HostError as error:
            return error
        finally:
            await transport.close()
        raise AssertionError("it connected")

    def config(known_hosts: str) -> str:
        path = tmp_path / f"config-{len(known_hosts)}"
        trusted = tmp_path / f"known-{len(known_hosts)}"
        trusted.write_text(known_hosts)
        text = f"Host *\n  IdentityFile {net.identity}\n  UserKnownHostsFile {trusted}\n"
        path.write_text(text)
        return str(path)

    async def scene() -> None:
        stranger = Path(net.known_hosts).read_text().splitlines()[0].split(" ", 1)[1]
        unknown = await failure(config(""))
        changed = await failure(config(f"{place.address} {stranger}\n"))
        net.cut(place)
        absent = await failure(net.config)
        net.heal(place)
        assert [type(one) for one in (unknown, changed, absent)] == [
            HostKeyError,
            HostKeyError,
            HostError,
        ]
        assert "ssh-keyscan" in unknown.hint
        assert "ssh-keygen -R" in changed.hint
        assert "cannot be reached" in str(absent)
        assert place.address in absent.hint

    play(scene())


def test_our_code_is_uploaded_once(net, tmp_path, run_id) -> None:
    async def scene() -> None:
        async with opened(net, 0, tmp_path, run_id) as (host, _):
            file = Path(host.code_dir, "libra_cli/node/agent/main.py")
        before = (file.stat().st_ino, file.stat().st_mtime_ns)
        async with opened(net, 0, tmp_path, run_id):
            assert (file.stat().st_ino, file.stat().st_mtime_ns) == before

    play(scene())
