"""The agent, which supervises the processes of one run on one host. Standard library only.

    python -m libra_cli.node.agent.main attach RUN_DIR   # connect stdin and stdout to the agent,
                                                         # which is started if there is none
    python -m libra_cli.node.agent.main serve  RUN_DIR   # be the agent; the guard that starts one
                                                         # adds the descriptor of its lease
    python -m libra_cli.node.agent.main stop   RUN_DIR   # stop and verify, with or without an agent

``RUN_DIR`` is ``<work directory>/runs/<run id>/<node>``; its last two parts are the marker by which
everything of the run is recognised. The agent listens on a socket in there, which only its owner
can enter. It speaks JSON lines: ``{"id": 1, "op": "tail", "process": "server-0", "lines": 20}`` is
answered by ``{"id": 1, "ok": true, "result": "..."}`` or ``{"id": 1, "ok": false, "kind": "...",
"error": "..."}``, in the order in which operations end. An event such as ``{"event": "exited",
...}`` may be sent at any time, to the controller that said hello last.

The lease: a controller that has not been heard for ``lease_s`` seconds is given up. Then, as after
a ``shutdown`` or a SIGTERM, the agent stops everything of the run, verifies that, and ends. A guard
holds the lease with it (``node.agent.lease``). The run's token stays in a file, so that a successor
of this agent refuses whoever has another one while processes of the run live.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from libra_cli.node.agent.agent_socket import bridge, connect, spawn
from libra_cli.node.agent.host_facts import bandwidth
from libra_cli.node.agent.host_facts.facts import facts
from libra_cli.node.agent.host_facts.model_files import fingerprints
from libra_cli.node.agent.lease.holder import Lease
from libra_cli.node.agent.lease.link import LeaseLink
from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.credentials import CREDENTIALS, Credentials
from libra_cli.node.inventory.collection import remove_old_code
from libra_cli.node.processes import remains
from libra_cli.node.processes.agent_log import LOG, log
from libra_cli.node.processes.log_rotation import EVERY_S
from libra_cli.node.processes.private_files import make_private, private, write_private
from libra_cli.node.processes.proc import Marker, boot_id
from libra_cli.node.processes.stop import (
    LAST_GRACE_S,
    LIFE,
    SOCKET,
    TOKEN,
    WEIGHTS,
    remove_traces,
    stop_everything,
)
from libra_cli.node.processes.supervisor import Supervisor, tail
from libra_cli.node.weights.weight_server import GroupSeat, WeightServer

ASKED_S = 60.0
"""How long an agent that is asked to stop everything may take."""
BIND_AGAIN_S = 1.0
LINE_LIMIT = 64 * 1024**2

Operation: TypeAlias = Callable[..., Awaitable[object]]


class Agent:
    """Answers on the socket. It decides nothing but when the lease is over."""

    def __init__(self, run_dir: Path, link: LeaseLink | None = None) -> None:
        self._run_dir = run_dir
        self._lease = Lease(run_dir, link, self._lease_over)
        self._supervisor = Supervisor(run_dir, Marker.of(run_dir), self._send_event)
        self._weight_server: WeightServer | None = None
        self._controller: asyncio.StreamWriter | None = None
        self._token = _token()
        self._credentials: Credentials | None = None
        self._ended = asyncio.Event()
        self._requests: set[asyncio.Task[None]] = set()
        self._operations: dict[str, Operation] = {
            "hello": self._hello,
            "ping": self._ping,
            "facts": self._facts,
            "model_files": self._model_files,
            "bandwidth_send": self._bandwidth_send,
            "bandwidth_receive": self._bandwidth_receive,
            "clear": self._clear,
            "ports": self._take_ports,
            "start": self._start,
            "stop": self._stop,
            "list": self._list,
            "tail": self._tail,
            "lease": self._tell_lease,
            "weights_serve": self._weights_serve,
            "pull": self._pull,
            "fabric_join": self._fabric_join,
            "fabric_connect": self._fabric_connect,
            "fabric_send": self._fabric_send,
            "forget": self._forget,
            "damaged": self._damaged,
            "shutdown": self._shutdown,
        }

    async def serve(self) -> None:
        """Answer until a shutdown, a SIGTERM or the end of the lease, then stop everything."""
        self._lease.open()  # before all that can fail
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._ended.set)
        self._supervisor.open()
        tasks = [asyncio.create_task(work) for work in (self._listen(), self._tidy())]
        await self._ended.wait()
        for task in tasks:
            task.cancel()
        self._lease.close()
        result = await self._supervisor.stop_all(LAST_GRACE_S)
        if self._weight_server is not None:
            self._weight_server.close()  # ends the pulls that are under way
        await asyncio.gather(*self._requests, return_exceptions=True)
        remove_traces(result)

    async def _listen(self) -> None:
        """Answer on the socket, which a full disk may keep from being made for a while."""
        while True:
            try:
                _remove(SOCKET)  # an agent that was killed leaves it; this one holds the lock
                async with await asyncio.start_unix_server(
                    self._serve_connection, SOCKET, limit=LINE_LIMIT
                ) as server:
                    await server.serve_forever()
            except OSError as error:
                log(f"{SOCKET}: {error}")
                await asyncio.sleep(BIND_AGAIN_S)

    async def _tidy(self) -> None:
        """Keep what grows within its bounds: the logs, and the code of runs that are long over."""
        try:
            for old in await asyncio.to_thread(remove_old_code, self._run_dir.parents[2]):
                log(f"removed {old.path}, {old.why}")
        except OSError as error:  # another agent removes the same
            log(f"old code was not looked through: {error}")
        while True:
            await asyncio.sleep(EVERY_S)
            await self._supervisor.rotate_logs()

    def _lease_over(self) -> None:
        self._ended.set()  # first: whatever is below may fail
        self._lease.close()
        log(f"no controller for {self._lease.seconds:.0f} s: stopping everything")

    # -- connections ---------------------------------------------------------------------------

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while line := await reader.readline():
                request = json.loads(line)
                if not isinstance(request, dict):
                    raise ValueError("a request is an object")
                if request.get("op") == "hello" and self._knows(request.get("token")):
                    self._take_over(writer)
                if writer is self._controller:  # whoever else asks keeps nothing alive
                    self._lease.renew()
                task = asyncio.create_task(self._answer(request, writer))
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)
        except (ValueError, ConnectionError) as error:
            log(f"a connection to a controller broke: {error}")
        finally:
            writer.close()

    def _take_over(self, writer: asyncio.StreamWriter) -> None:
        """Make this the controller's connection: an older one may be dead without a sign."""
        if self._controller is not None and self._controller is not writer:
            self._controller.close()
        self._controller = writer

    async def _answer(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number, name = request.pop("id", None), request.pop("op", None)
        try:
            if name not in self._operations:
                raise AgentRefused("request", f"{name!r} is no operation")
            result = await self._operations[name](**request)
            answer = {"id": number, "ok": True, "result": result}
        except AgentRefused as refused:
            answer = {"id": number, "ok": False, "kind": refused.kind, "error": str(refused)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the controller must hear of it
            log(traceback.format_exc())
            reason = f"{name}: {type(error).__name__}: {error}"
            answer = {"id": number, "ok": False, "kind": "request", "error": reason}
        await _write(writer, answer)

    def _send_event(self, event: dict[str, object]) -> None:
        # Nobody there: whoever attaches next is told by hello, which lists every process.
        if self._controller is not None and not self._controller.is_closing():
            self._controller.write(json.dumps(event).encode() + b"\n")

    # -- the operations ------------------------------------------------------------------------

    async def _hello(
        self,
        token: str,
        lease_s: float,
        weights_dir: str,
        credentials: Mapping[str, str] | None = None,
    ) -> dict[str, object]:
        if not self._knows(token):
            raise AgentRefused("request", "a run of this name is alive here and has another token")
        self._lease.renew(lease_s)
        try:
            if self._token != token or _token() != token:
                write_private(Path(TOKEN), token)
            self._token = token
            if self._weight_server is None:
                root = Path(weights_dir, self._run_dir.parent.name)
                if credentials is not None:
                    self._credentials = Credentials.of(token, credentials)
                    write_private(Path(CREDENTIALS), self._credentials.as_json())
                self._weight_server = WeightServer(root, self._credentials)
                _remove(WEIGHTS)
                os.symlink(root, WEIGHTS)
            life = _life()
        except OSError as error:
            raise AgentRefused("disk", f"{error.filename}: {error.strerror}") from error
        return {"pid": os.getpid(), "life": life, "processes": self._supervisor.describe()}

    def _knows(self, token: object) -> bool:
        """Whether a controller is the run's own; while nothing of it lives, any with a token is."""
        alive = self._weight_server is not None or self._supervisor.is_busy
        return bool(token) and (token == self._token or not self._token or not alive)

    async def _tell_lease(self) -> dict[str, object]:
        """How long the lease lasts yet, and how long ago the controller was heard, in seconds."""
        left_s = self._lease.left_s
        return {"left_s": left_s, "heard_s": self._lease.seconds - left_s}

    async def _ping(self) -> None:
        pass

    async def _facts(
        self,
        peers: Sequence[str],
        packages: Sequence[str],
        paths: Sequence[str],
        devices: Sequence[str] = (),
        *,
        sandbox: bool = False,
    ) -> dict[str, object]:
        places = self._run_dir, self._weights().root
        words = peers, packages, paths, devices
        return await asyncio.to_thread(facts, *words, *places, sandbox=sandbox)

    async def _model_files(self, path: str) -> dict[str, object]:
        return await asyncio.to_thread(fingerprints, path)

    async def _bandwidth_send(self, bind: str, port: int, seconds: float) -> None:
        bandwidth.serve(bind, port, self._known(), seconds)

    async def _bandwidth_receive(self, source: str) -> dict[str, float]:
        return await asyncio.to_thread(bandwidth.receive, source, self._known())

    async def _clear(self, names: Sequence[str]) -> list[str]:
        runs = self._run_dir.parents[1]
        return await asyncio.to_thread(remains.remove, runs, self._weights().root, names)

    async def _take_ports(
        self, first: int, last: int, count: int, taken: Collection[int]
    ) -> list[int]:
        return self._supervisor.ports.take(first, last, count, taken)

    async def _start(
        self,
        process: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        files: Mapping[str, str],
        ports: Sequence[int] = (),
    ) -> dict[str, object]:
        if self._ended.is_set():
            raise AgentRefused("start", f"{process}: the run is being stopped here")
        return self._supervisor.start(process, argv, env, cwd, files, ports).describe()

    async def _stop(self, process: str, grace_s: float) -> dict[str, object]:
        return asdict(await self._supervisor.stop(process, grace_s))

    async def _list(self) -> list[dict[str, object]]:
        return self._supervisor.describe()

    async def _tail(self, process: str, lines: int) -> str:
        return self._supervisor.tail(process, lines)

    async def _weights_serve(self, bind: str, port: int) -> int:
        return self._weights().serve(bind, port)

    async def _fabric_join(self, group: str, interface: str, rank: int, size: int) -> str:
        join = self._weights().fabric.join
        return await asyncio.to_thread(join, group, interface, rank, size)

    async def _fabric_connect(self, seat: Mapping[str, Any]) -> None:
        place = GroupSeat(**seat)
        await asyncio.to_thread(self._weights().fabric.connect, place.group, place.addresses)

    async def _fabric_send(self, name: str, seat: Mapping[str, Any], limit_s: float) -> None:
        await asyncio.to_thread(self._weights().send, name, GroupSeat(**seat), limit_s)

    async def _pull(
        self,
        name: str,
        sources: Sequence[str],
        limit_s: float,
        seat: Mapping[str, Any] | None = None,
    ) -> dict[str, object]:
        place = GroupSeat(**seat) if seat else None
        pulled = await asyncio.to_thread(self._weights().pull, name, sources, limit_s, place)
        if pulled.detail:
            log(f"{name}: {pulled.detail}")
        return asdict(pulled)

    async def _forget(self, keep: Collection[str]) -> list[str]:
        return await asyncio.to_thread(self._weights().forget, keep)

    async def _damaged(self, name: str) -> str:
        return await asyncio.to_thread(self._weights().damaged, name)

    async def _shutdown(self, grace_s: float) -> dict[str, object]:
        self._lease.close()  # its guard is stopped with the rest
        result = await self._supervisor.stop_all(grace_s)
        self._ended.set()
        return asdict(result)

    def _known(self) -> Credentials:
        if self._credentials is None:
            raise AgentRefused("request", "it has no certificate to show to other hosts")
        return self._credentials

    def _weights(self) -> WeightServer:
        if self._weight_server is None:
            raise AgentRefused("request", "say hello first")
        return self._weight_server


# -- the three commands ------------------------------------------------------------------------


def serve(run_dir: Path, link: LeaseLink | None = None) -> int:
    """Be the agent of a run directory, unless somebody else already is."""
    with open(remains.LOCK, "a", opener=private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # what it starts inherits it
        asyncio.run(Agent(run_dir, link).serve())
    return 0


def attach(run_dir: Path) -> int:
    """Connect standard input and output to the agent, and start it if there is none."""
    connection = connect() or spawn(run_dir)
    if connection is None:
        sys.stderr.write(f"the agent did not start: {tail(run_dir / LOG, 1)}\n")
        return 1
    bridge(connection)
    return 0


def stop(run_dir: Path) -> int:
    """Stop everything of the run on this host; 0 if nothing is left.

    An agent that is there is asked to do it. Then this process searches as well and stops what it
    finds: an agent that did not answer, or processes that the agent did not know.
    """
    connection = connect()
    if connection is not None:
        _ask_to_stop(connection)
    result = stop_everything(run_dir)
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    return 1 if result.leftovers else 0


def _ask_to_stop(connection: socket.socket) -> None:
    connection.settimeout(ASKED_S)
    with connection, connection.makefile("rw") as file, suppress(OSError):
        file.write(json.dumps({"id": 0, "op": "shutdown", "grace_s": LAST_GRACE_S}) + "\n")
        file.flush()
        file.read()  # to the very end: it hangs up when it is done


async def _write(writer: asyncio.StreamWriter, message: object) -> None:
    try:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()
    except ConnectionError as error:  # the controller asks again when it is back
        log(f"an answer was not taken: {error}")


def _token() -> str:
    """The token that an earlier agent of this run has written; empty if there is none."""
    with suppress(OSError, ValueError):
        return Path(TOKEN).read_text(encoding="utf-8").strip()
    return ""


def _life() -> str:
    """Name the life of what the run has here, which ends with the lease or the boot."""
    with suppress(FileExistsError):
        os.symlink(secrets.token_hex(8), LIFE)
    return f"{boot_id()} {os.readlink(LIFE)}"


def _remove(*names: str) -> None:
    for name in names:
        Path(name).unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """Run one of the three commands in the run directory, and return its exit code."""
    commands = {"serve": serve, "attach": attach, "stop": stop}
    command, *rest = arguments or ["help"]
    if command not in commands or len(rest) not in (1, 2):
        sys.stderr.write("usage: python -m libra_cli.node.agent.main serve|attach|stop RUN_DIR\n")
        return 2
    run_dir = Path(rest[0]).resolve()
    make_private(run_dir)
    os.chdir(run_dir)
    if command == "serve" and len(rest) == 2:
        return serve(run_dir, LeaseLink(socket.socket(fileno=int(rest[1]))))
    return commands[command](run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
