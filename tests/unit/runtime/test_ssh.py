"""The SSH transport against a real sshd on loopback, run by whoever runs the tests.

Several hosts and broken cables are in ``tests/integration/test_hosts.py``.
"""
# ruff: noqa: ASYNC240 - small files of the test's own

from __future__ import annotations

import asyncio
import contextlib
import getpass
import hashlib
import io
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from libra_cli.config.errors import HostError, HostKeyError, HostLost
from libra_cli.runtime.hosts import ssh
from libra_cli.runtime.hosts.ssh import SshTransport
from libra_cli.runtime.hosts.ssh_target import SshTarget, resolve_route
from libra_cli.runtime.hosts.transport import Endpoint
from tests.sockets import socket_path

SSHD = "/usr/sbin/sshd"
DEADLINE_S = 15.0
BIG = 8 * 1024**2

pytestmark = pytest.mark.skipif(not Path(SSHD).exists(), reason=f"there is no {SSHD} here")


@dataclass(frozen=True, slots=True)
class Server:
    """An sshd on loopback, and a home directory that may log in to it."""

    home: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def identity(self) -> str:
        return str(self.home / ".ssh/id_ed25519")

    @property
    def known_hosts(self) -> Path:
        return self.home / ".ssh/known_hosts"

    def transport(self, **options: Any) -> SshTransport:
        return SshTransport("127.0.0.1", **{"port": self.port, **options})


def make_key(path: Path, passphrase: str = "") -> str:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(argv, check=True)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def sshd(home: Path, options: str = "") -> Iterator[Server]:
    """A server whose host key is in ``known_hosts``."""
    port, directory = free_port(), home / "sshd"
    directory.mkdir()
    key = make_key(directory / "host_key")
    (home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{port} {key}\n")
    (directory / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {directory}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {home}/.ssh/id_ed25519.pub\nStrictModes no\nUsePAM no\nUseDNS no\n"
        f"PasswordAuthentication no\nSubsystem sftp internal-sftp\n{options}"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    argv = [SSHD, "-D", "-e", "-f", str(directory / "config")]
    with open(directory / "log", "w") as log, subprocess.Popen(argv, stderr=log) as process:
        try:
            await_banner(port)
            yield Server(home, port, process)
        finally:
            process.terminate()


def await_banner(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionError):
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as line:
                assert line.recv(4) == b"SSH-"
            return
        time.sleep(0.02)
    raise TimeoutError("the sshd did not start")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory with a key, and no SSH agent."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    make_key(tmp_path / ".ssh/id_ed25519")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


@pytest.fixture
def server(home: Path) -> Iterator[Server]:
    with sshd(home) as running:
        yield running


@asynccontextmanager
async def connected(server: Server, **options: Any) -> AsyncIterator[SshTransport]:
    transport = server.transport(**options)
    try:
        await transport.connect()
        yield transport
    finally:
        await transport.close()


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def failure(transport: SshTransport, timeout_s: float = 10.0) -> HostError:
    """What connecting raises."""

    async def scene() -> HostError:
        try:
            await transport.connect(timeout_s=timeout_s)
        except HostError as error:
            return error
        finally:
            await transport.close()
        raise AssertionError("it connected")

    return asyncio.run(scene())


# -- commands and files --------------------------------------------------------------------------


def test_a_command_gets_its_words_and_input_and_gives_back_its_output_and_code(server) -> None:
    async def scene() -> None:
        async with connected(server) as transport:
            words = ["a b", "$HOME", "it's", '"', "*", "~", ";ls", "\\", ""]
            done = await transport.run(["printf", "%s\n", *words], timeout_s=DEADLINE_S)
            assert done.stdout.decode().split("\n")[:-1] == words
            argv = ["sh", "-c", "cat; echo trouble >&2; exit 3"]
            done = await transport.run(argv, stdin=b"input", timeout_s=DEADLINE_S)
            assert (done.exit_code, done.stdout, done.last_words) == (3, b"input", "trouble")

    play(scene())


def test_a_lot_in_all_three_directions_does_not_lock_up(server) -> None:
    source = (
        "import sys; data = sys.stdin.buffer.read(); sys.stderr.buffer.write(data);"
        "sys.stdout.buffer.write(data); sys.stderr.write('the end')"
    )
    data = os.urandom(BIG)

    async def scene() -> None:
        async with connected(server) as transport:
            done = await transport.run(
                [sys.executable, "-c", source], stdin=data, timeout_s=DEADLINE_S
            )
            assert done.stdout == data
            assert done.stderr.endswith(b"the end")

    play(scene())


def test_a_command_that_does_not_end_is_given_up_by_name(server) -> None:
    async def scene() -> None:
        async with connected(server) as transport:
            with pytest.raises(HostLost, match=r"127.0.0.1: sleep: no answer within 0\.2 s"):
                await transport.run(["sleep", "30"], timeout_s=0.2)
            assert (await transport.run(["true"], timeout_s=DEADLINE_S)).exit_code == 0

    play(scene())


def test_a_stream_carries_lines_both_ways_and_tells_what_went_wrong(server) -> None:
    async def scene() -> None:
        async with connected(server) as transport:
            stream = await transport.open_stream(["sh", "-c", "cat; echo bad >&2; printf end"])
            await stream.write(b"one\n" + BIG * b"x" + b"\n")
            assert await stream.readline() == b"one\n"
            assert len(await stream.readline()) == BIG + 1
            await stream.end_input()
            assert await stream.readline() == b"end"
            assert await stream.readline() == b""
            assert stream.errors == "bad"
            await stream.close()

    play(scene())


def test_a_channel_that_hears_nothing_knows_what_others_of_its_connection_hear(server) -> None:
    async def scene() -> None:
        async with connected(server) as transport:
            stream = await transport.open_stream(["cat"])
            await asyncio.sleep(0.3)
            assert stream.link_silent_s >= 0.25
            assert (await transport.run(["echo", "x"], timeout_s=10.0)).stdout == b"x\n"
            assert stream.link_silent_s < 0.25
            await stream.close()

    play(scene())


def test_a_tree_appears_whole_and_is_never_written_twice(server, tmp_path) -> None:
    target = tmp_path / "code/abc"

    async def scene() -> None:
        async with connected(server) as transport:
            trees = ({"a/b/c.py": b"x", "d": bytes([number])} for number in range(3))
            await asyncio.gather(*(transport.put_tree(tree, str(target)) for tree in trees))
            assert (target / "a/b/c.py").read_bytes() == b"x"
            kept = await transport.get(f"{target}/d")
            await transport.put_tree({"d": b"later"}, str(target))
            assert await transport.get(f"{target}/d") == kept
            assert [one.name for one in target.parent.iterdir()] == ["abc"]
            with pytest.raises(HostError, match="/nowhere: no such file"):
                await transport.get("/nowhere")
            with pytest.raises(HostError, match="cannot write /proc/x"):
                await transport.put_tree({"a": b""}, "/proc/x")

    play(scene())


# -- trust ---------------------------------------------------------------------------------------


def test_an_unknown_host_key_is_refused_with_the_command_that_makes_it_known(server) -> None:
    server.known_hosts.unlink()
    error = failure(server.transport())
    assert isinstance(error, HostKeyError)
    assert "its host key is unknown (ssh-ed25519 SHA256:" in str(error)
    command = error.hint.partition("then: ")[2]
    subprocess.run(
        command.replace("~", str(server.home)), shell=True, check=True
    )  # as a user would

    async def scene() -> None:
        async with connected(server) as transport:
            assert transport.home

    play(scene())


def test_a_changed_host_key_is_refused_with_the_command_that_forgets_the_old(server) -> None:
    other = make_key(server.home / "other")
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {other}\n")
    error = failure(server.transport())
    assert isinstance(error, HostKeyError)
    assert "its host key has changed" in str(error)
    command = error.hint.partition(": ")[2].replace("~", str(server.home))
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert "unknown" in str(failure(server.transport()))


def test_a_key_that_is_not_accepted_is_named(server) -> None:
    make_key(server.home / "wrong")
    error = failure(server.transport(identity=str(server.home / "wrong")))
    assert f"accepts none of the keys tried ({server.home}/wrong)" in str(error)
    assert error.hint.startswith(f"ssh-copy-id -p {server.port} {getpass.getuser()}@127.0.0.1")
    assert error.exit_code == 3


def test_a_key_with_a_passphrase_needs_the_agent(server) -> None:
    make_key(server.home / "locked", passphrase="secret words")
    error = failure(server.transport(identity=str(server.home / "locked")))
    assert "passphrase" in str(error)
    assert error.hint == f"ssh-add {server.home}/locked"


def test_the_keys_of_the_ssh_agent_are_used(server, monkeypatch) -> None:
    path = server.home / "agent.sock"
    argv = ["ssh-agent", "-D", "-a", str(path)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as agent:
        try:
            monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
            deadline = time.monotonic() + DEADLINE_S
            # Its socket is there before it listens; 2 says that nobody answers.
            asked = ["ssh-add", "-l"]
            while subprocess.run(asked, capture_output=True, check=False).returncode == 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            add = ["ssh-add", "-q", server.identity]
            subprocess.run(add, check=True, capture_output=True)
            shutil.move(server.identity, server.home / "elsewhere")

            async def scene() -> None:
                async with connected(server) as transport:
                    assert transport.home

            play(scene())
        finally:
            agent.terminate()


# -- reaching ------------------------------------------------------------------------------------


def test_a_port_where_nobody_listens_is_told_from_a_host_that_is_silent(home) -> None:
    port = free_port()
    error = failure(SshTransport("127.0.0.1", port=port))
    assert "cannot be reached: Connection refused" in str(error)
    assert error.hint == f"ssh -p {port} {getpass.getuser()}@127.0.0.1 true"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = failure(SshTransport("127.0.0.1", port=silent.getsockname()[1]), timeout_s=0.3)
    assert "cannot be reached" in str(error)


def test_a_name_that_nobody_knows_is_named(home) -> None:
    error = failure(SshTransport("gpu-01.invalid"))
    assert "gpu-01.invalid: no host of this name is known" in str(error)


def test_the_users_configuration_is_followed(server) -> None:
    shutil.move(server.identity, server.home / "key")
    shutil.move(server.known_hosts, server.home / "trusted")
    (server.home / ".ssh/config").write_text(
        f"Host gpu-*\n  HostName 127.0.0.1\n  Port {server.port}\n  User {getpass.getuser()}\n"
        "  IdentityFile ~/key\n  UserKnownHostsFile ~/trusted\n"
        "Host far\n  HostName 127.0.0.1\n  ProxyJump gpu-02\n"
        f"  Port {server.port}\n  IdentityFile ~/key\n  UserKnownHostsFile ~/trusted\n"
        "Host odd\n  ProxyCommand nc %h %p\n"
    )

    async def scene(host: str) -> None:
        transport = SshTransport(host)
        await transport.connect()
        assert (await transport.run(["echo", "hi"], timeout_s=DEADLINE_S)).stdout == b"hi\n"
        await transport.close()

    play(scene("gpu-01"))
    play(scene("far"))
    error = failure(SshTransport("odd"))
    assert "ProxyCommand" in str(error)
    assert "ProxyJump" in error.hint


def test_a_jump_host_may_come_from_the_recipe_and_the_hop_that_fails_is_named(server) -> None:
    me = getpass.getuser()

    async def scene() -> None:
        jump = f"{me}@127.0.0.1:{server.port}"
        async with connected(server, identity=server.identity, jump=jump) as transport:
            assert (await transport.run(["echo", "hi"], timeout_s=DEADLINE_S)).stdout == b"hi\n"

    play(scene())
    shut = free_port()
    error = failure(server.transport(jump=f"{me}@127.0.0.1:{shut}"))
    assert f"{me}@127.0.0.1:{shut} cannot be reached: Connection refused" in str(error)
    error = failure(server.transport(port=shut, jump=f"127.0.0.1:{server.port}"))
    assert f"{me}@127.0.0.1:{shut} cannot be reached" in str(error)


def test_the_recipe_wins_over_the_configuration(home) -> None:
    (home / ".ssh/config").write_text("Host a\n  User bob\n  Port 2222\n  ProxyJump b,c\n")
    hops = resolve_route(SshTarget("a"), "~/.ssh/config", None)
    assert [str(hop).partition("@")[2] for hop in hops] == ["b", "c", "a:2222"]
    assert str(hops[-1]) == "bob@a:2222"
    (direct,) = resolve_route(
        SshTarget("a", user="eve", port=22, jump="none"), "~/.ssh/config", None
    )
    assert str(direct) == "eve@a"


# -- forwarding ----------------------------------------------------------------------------------


@asynccontextmanager
async def echo_server(path: str = "") -> AsyncIterator[str]:
    """Answers with what it is sent, on a Unix socket whose path it gives."""
    path = path or socket_path()

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application(client_max_size=2 * BIG)
    app.router.add_post("/", echo)
    runner = web.AppRunner(app, keepalive_timeout=DEADLINE_S)
    await runner.setup()
    await web.UnixSite(runner, path).start()
    try:
        yield path
    finally:
        await runner.cleanup()


def client(endpoint: Endpoint) -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(path=endpoint.path, limit=0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    return aiohttp.ClientSession("http://host", connector=connector, timeout=timeout)


async def post(session: aiohttp.ClientSession, data: bytes) -> bytes:
    async with session.post("/", data=io.BytesIO(data)) as response:
        return await response.read()


def test_thirty_connections_at_once_take_no_thread_each(server) -> None:
    others = set(threading.enumerate())  # what tests before this one have left to end by itself

    async def scene() -> None:
        async with connected(server) as transport, echo_server() as path:
            endpoint = await transport.dial(path)
            assert await transport.dial(path) == endpoint
            async with client(endpoint) as session:
                await post(session, b"warm up")
                for turn in range(5):
                    bodies = [f"{turn} {number}".encode() * 100 for number in range(30)]
                    answers = await asyncio.gather(*(post(session, body) for body in bodies))
                    assert answers == bodies
                new = set(threading.enumerate()) - others
                ours = [one for one in new if one.name.startswith("ssh ")]
                assert len(ours) <= 8
                assert len(new) - len(ours) <= 4
        assert not Path(endpoint.path).exists()

    play(scene())


def test_big_bodies_pass_unharmed_in_both_directions(server) -> None:
    bodies = [os.urandom(BIG) for _ in range(3)]

    async def scene() -> None:
        async with (
            connected(server) as transport,
            echo_server() as path,
            client(await transport.dial(path)) as session,
        ):
            answers = await asyncio.gather(*(post(session, body) for body in bodies))
        digests = [hashlib.sha256(data).digest() for data in (*bodies, *answers)]
        assert digests[:3] == digests[3:]

    play(scene())


def test_an_endpoint_may_be_dialled_before_its_server_is_there(server) -> None:
    async def scene() -> None:
        path = socket_path()
        async with connected(server) as transport:
            endpoint = await transport.dial(path)
            assert Path(endpoint.path).parent.stat().st_mode & 0o777 == 0o700
            async with client(endpoint) as session:
                with pytest.raises(aiohttp.ClientConnectionError):
                    await post(session, b"too early")
                async with echo_server(path):
                    assert await post(session, b"now") == b"now"

    play(scene())


def test_an_endpoint_outlives_the_connection_it_was_made_with(server) -> None:
    async def scene() -> None:
        async with connected(server) as transport, echo_server() as path:
            stream = await transport.open_stream(["sh", "-c", "echo $PPID; cat"])
            session_pid = int(await stream.readline())
            async with client(await transport.dial(path)) as session:
                assert await post(session, b"before") == b"before"
                os.kill(session_pid, signal.SIGKILL)  # the sshd process of this connection
                assert await stream.readline() == b""
                with pytest.raises(HostLost):
                    await transport.run(["true"], timeout_s=DEADLINE_S)
                with pytest.raises(aiohttp.ClientConnectionError):
                    await post(session, b"lost")
                await transport.connect()
                assert await post(session, b"after") == b"after"

    play(scene())


def test_a_host_that_forbids_forwarding_says_so_at_once(home) -> None:
    async def scene(server: Server) -> None:
        async with connected(server) as transport, echo_server() as path:
            with pytest.raises(HostError, match="does not forward to Unix sockets") as told:
                await transport.reach(path)
            assert "AllowStreamLocalForwarding yes" in (told.value.hint or "")

    with sshd(home, "AllowStreamLocalForwarding no\n") as server:
        play(scene(server))


def test_a_socket_of_a_host_is_reached_where_nothing_is_forbidden(server) -> None:
    async def scene() -> None:
        async with connected(server) as transport, echo_server() as path:
            await transport.reach(path)
            with pytest.raises(HostError):
                await transport.reach(socket_path())

    play(scene())


def test_a_host_that_opens_one_session_alone_says_which_setting_that_is(home) -> None:
    async def scene(server: Server) -> None:
        async with connected(server) as transport:
            with pytest.raises(HostError, match="opens no further session") as told:
                await asyncio.gather(*(transport.open_stream(["cat"]) for _ in range(2)))
            assert "MaxSessions" in (told.value.hint or "")

    with sshd(home, "MaxSessions 1\n") as server:
        play(scene(server))


def test_a_host_that_takes_no_more_connections_is_asked_again_and_then_named(
    home, monkeypatch
) -> None:
    monkeypatch.setattr(ssh, "BUSY_PAUSES_S", (0.01, 0.01))
    asked = 0
    with socket.create_server(("127.0.0.1", 0)) as full:
        full.settimeout(DEADLINE_S)

        def turn_away() -> None:
            nonlocal asked
            with contextlib.suppress(OSError):
                while True:
                    line, _ = full.accept()
                    asked += 1
                    with line:
                        line.sendall(b"Exceeded MaxStartups\r\n")

        threading.Thread(target=turn_away, daemon=True).start()
        error = failure(SshTransport("127.0.0.1", port=full.getsockname()[1]))
    assert "takes no more connections just now" in str(error)
    assert "MaxStartups" in (error.hint or "")
    assert asked == 3


def test_a_key_that_others_can_read_is_told(server, home) -> None:
    key = home / ".ssh/id_ed25519"

    async def scene() -> None:
        async with connected(server, identity=str(key)) as transport:
            told.append(list(transport.warnings))

    told: list[list[str]] = []
    play(scene())
    key.chmod(0o644)
    play(scene())
    key.chmod(0o600)
    assert told[0] == []
    assert told[1] == [
        f"{key} can be read by others than you, and ssh would refuse it: chmod 600 {key}"
    ]


def test_a_socket_that_does_not_listen_yet_is_no_line_in_a_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("paramiko.transport")
    logger.error("Secsh channel 3 open FAILED: open failed: Connect failed")
    logger.error("Exception (client): the cable was cut")
    assert [record.getMessage() for record in caplog.records] == [
        "Exception (client): the cable was cut"
    ]
