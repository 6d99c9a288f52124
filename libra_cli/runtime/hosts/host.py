"""The controller's handle of one host and of the processes that libra runs on it.

``Host.open`` connects, uploads this package (once per content), starts or finds the agent of the
run, and keeps the connection up. When it breaks, ``ConnectionLost`` is reported, requests wait, and
the host connects again with growing pauses. If that succeeds within the lease, ``Reconnected`` is
reported and the processes are the same as before. Otherwise ``LeaseExpired`` is, since by then the
agent, or its guard, stops everything; requests fail, and the host is asked again for as long as the
run lasts. When it answers, whatever may still run there is stopped, a new agent is started, and
``Rejoined`` is reported. The same happens where the agent that answers has begun anew: the host
was rebooted, or this controller did not run for longer than the lease (its machine slept).

Every exit is reported exactly once, as ``Exited``, even if it happened while there was no
connection, and never before the ``start`` that it belongs to has returned.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from libra_cli.config.errors import HostError, HostKeyError, HostLost, LibraError
from libra_cli.core.preflight.host_report import ModelFiles, NodeFacts
from libra_cli.runtime.hosts.agent_connection import AgentConnection, Message
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    Exited,
    HostEvent,
    LeaseExpired,
    ProcessState,
    PulledVersion,
    Reconnected,
    Rejoined,
    Seat,
    StartedProcess,
    StoppedProcess,
)
from libra_cli.runtime.hosts.transport import THINNEST_BYTES_S, Endpoint, Transport
from libra_cli.runtime.hosts.upload import last_line, package, put_code
from libra_cli.runtime.supervision.answers import built, reads_answers
from libra_cli.runtime.supervision.failures import words_of

_log = logging.getLogger(__name__)

ANSWER_S = 30.0
READ_BYTES_S = 50e6
"""Bytes a second of a slow disk, and of one core that hashes."""
STOP_EXTRA_S = 20.0
"""What a stop may take beyond its grace, for killing, verifying and the network."""
STOP_S = 90.0
PING_INTERVAL_S = 5.0
PINGS_A_LEASE = 5
"""Pings that go out in a lease at least, so that a dead connection can be replaced in time."""
MODEL_FILES_S = 120.0
"""Seconds for fingerprints of a model on a slow or shared disk."""
FACTS_S = 150.0
"""nvidia-smi may take a minute, and is called twice where a GPU is split into instances."""
RECONNECT_S = 10.0
AGENT_PAUSES_S = (1.0, 2.0, 4.0)
"""Pauses after attaching to an agent that does not listen: one that ends may take its grace."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
FIRST_REJOIN_S, LONGEST_REJOIN_S = 5.0, 60.0
"""Between two questions to a host that was given up."""
LAST_S = 60.0
"""How long after the lease agent and guard may take to stop everything (``node.agent.lease``)."""
COMMAND_S = 30.0

MAKE_TMP = """
umask 077 && mkdir -p "$1" && cd "$1" || exit
[ -L tmp ] && [ -d tmp/. ] && [ -O tmp/. ] ||
{ made=$(mktemp -d -t libra-XXXXXXXX) && ln -sfn "$made" tmp; } &&
ln -sfn "$1/agent.sock" tmp/agent.sock && readlink tmp
"""
"""Makes a directory for the temporary files and the sockets of a run, whose paths must be short,
unless there is one of ours; ``tmp`` in the run's directory is a link to it, and ``agent.sock`` in
it is one to the agent's socket."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")


class LeaseOver(HostError):
    """The agent that answers is another than before, which has stopped everything."""


class Host:
    """One node of a run. Its paths are absolute ones on the host, known once it is open."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        workdir: str = "~/.libra",
        python: str | None = None,
        ping_interval_s: float = PING_INTERVAL_S,
        first_rejoin_s: float = FIRST_REJOIN_S,
    ) -> None:
        if not NAME.fullmatch(name):
            raise HostError(f"{name!r} is no name for a node: use letters, digits, '.', '_', '-'")
        self.name = name
        self.transport = transport
        self.workdir = workdir
        self.python = python or transport.default_python
        self.code_dir = ""
        self.run_dir = ""
        self.tmp_dir = ""
        self.weights_dir = ""
        self._ping_interval_s = ping_interval_s
        self._first_rejoin_s = first_rejoin_s
        self._run_id = ""
        self._hello: Message = {}
        self._exits: dict[tuple[str, int, int], bool] = {}
        """Whether the exit of each known process, by name, pid and start, has been reported."""
        self._connection = AgentConnection(name, self._on_message)
        self._keep_task: asyncio.Task[None] | None = None
        self._life: str | None = None
        """A name of what the run has there, which ends with the lease and the host's boot."""
        self._on_event: Callable[[HostEvent], None] = lambda event: None

    # -- the connection ------------------------------------------------------------------------

    async def open(
        self,
        run_id: str,
        *,
        token: str,
        lease_s: float,
        weights_dir: str,
        on_event: Callable[[HostEvent], None],
        credentials: Mapping[str, str] | None = None,
    ) -> None:
        """Connect, upload, and attach to the agent of this run; events are reported from then on.

        ``credentials`` are what it shows to other hosts (``Authority.issue``); without them it has
        nothing to do with any.

        Raises:
            HostError: the host cannot be reached, trusted or used.
        """
        self._on_event = on_event
        self._run_id = run_id
        try:
            await self.prepare(run_id)
            home = self.transport.home.rstrip("/").rpartition("/")[2]
            self.weights_dir = self.expand(weights_dir) if weights_dir else f"/dev/shm/libra-{home}"
            self._hello = {
                "token": token,
                "credentials": credentials and dict(credentials),
                "lease_s": lease_s,
                "weights_dir": self.weights_dir,
            }
            rows = await self._attach_for_good()
        except BaseException:
            await self.close()
            raise
        self._exits = {_key(row): row["state"] == "exited" for row in rows}
        self._keep_task = asyncio.create_task(self._keep_connected(lease_s))

    async def close(self) -> None:
        """Disconnect. Processes go on there until the lease is over."""
        await self._hang_up()
        self._connection.fail(HostLost(f"{self.name}: closed"))
        await self.transport.close()

    async def shutdown(
        self, *, grace_s: float = 10.0, remove_logs: bool = False
    ) -> tuple[str, ...]:
        """Stop everything of the run there, verify that, disconnect, and return what is left.

        The agent stops its processes and verifies; then a fresh process verifies again, since the
        agent itself has to be gone too. A host whose agent does not answer is connected to anew,
        once, for that second part.

        Raises:
            HostError: it does not answer; the message says when its lease ends what runs there.
        """
        try:
            if self._keep_task is None:  # it was never open, so nothing was started
                return ()
            left = await self._shut_down(grace_s)
            if remove_logs:
                directory = self.run_dir.rpartition("/")[0]
                await self.transport.run(["rm", "-r", directory], timeout_s=ANSWER_S)
            return left
        except HostError as error:
            raise HostError(f"{error}; {self._end_by_lease()}") from error
        finally:
            await self.close()

    async def _shut_down(self, grace_s: float) -> tuple[str, ...]:
        limit_s = 2 * grace_s + STOP_EXTRA_S
        try:
            await self._connection.ask("shutdown", timeout_s=limit_s, grace_s=grace_s)
        except HostLost:
            await self._hang_up()
            await self.transport.connect(timeout_s=RECONNECT_S)
        await self._hang_up()
        return await self._stop_and_verify()

    def _end_by_lease(self) -> str:
        left_s = self._hello["lease_s"] + LAST_S - self._connection.silent_s
        at = time.strftime("%H:%M", time.localtime(time.time() + left_s + 60.0))  # rounded up
        return f"its lease {'ends' if left_s > 0 else 'has ended'} what runs there at {at}"

    async def stop_remains(self, run_id: str) -> tuple[str, ...]:
        """Stop what a run has left there, without its controller, token or agent; as above."""
        try:
            await self.prepare(run_id)
            return await self._stop_and_verify()
        finally:
            await self.close()

    def module_argv(self, module: str, env: Mapping[str, str] | None = None) -> list[str]:
        """Return the command line there of a module of ours, which needs no agent."""
        values = [f"{name}={value}" for name, value in (env or {}).items()]
        return ["env", *values, f"PYTHONPATH={self.code_dir}", self.python, "-P", "-m", module]

    def expand(self, path: str) -> str:
        """Return a path of the recipe as an absolute one on the host."""
        return f"{self.transport.home}{path[1:]}" if path.partition("/")[0] == "~" else path

    @property
    def life(self) -> str:
        """A name of what the run has there, which ends with the lease and the host's boot."""
        return self._life or ""

    @property
    def behind_s(self) -> float:
        """For how long an answer of its agent to a ping is due: on a busy link all are late."""
        return self._connection.behind_s

    # -- operations ----------------------------------------------------------------------------

    @reads_answers(HostError)
    async def facts(
        self,
        peers: Sequence[str] = (),
        *,
        packages: Sequence[str] = (),
        paths: Sequence[str] = (),
        devices: Sequence[str] = (),
        sandbox: bool = False,
    ) -> NodeFacts:
        """Describe the host, which of the packages and paths it has, and those GPUs of it, or all;
        with ``sandbox`` also whether it can make one.

        Raises:
            HostError: it does not answer.
        """
        asked = {"peers": peers, "packages": packages, "paths": paths, "devices": devices}
        words = {name: [*values] for name, values in asked.items()}
        found = await self._connection.ask("facts", timeout_s=FACTS_S, sandbox=sandbox, **words)
        return NodeFacts.read(found)

    @reads_answers(HostError)
    async def model_files(self, path: str) -> ModelFiles:
        """Return fingerprints of a model directory's files, and its configuration.

        Raises:
            HostError: there is no such directory, or it cannot be read.
        """
        found = await self._connection.ask("model_files", timeout_s=MODEL_FILES_S, path=path)
        files = {name: (int(size), str(digest)) for name, (size, digest) in found["files"].items()}
        return ModelFiles(files, found["config"])

    async def send_bandwidth(self, bind: str, port: int, seconds: float) -> None:
        """Send to the next host of the run that asks there, for so many seconds."""
        await self._ask("bandwidth_send", bind=bind, port=port, seconds=seconds)

    @reads_answers(HostError)
    async def receive_bandwidth(self, source: str) -> tuple[int, float]:
        """Receive what another host sends at a ``peer_url``; returns bytes and seconds.

        Raises:
            HostError: nothing comes from there.
        """
        found = await self._ask("bandwidth_receive", source=source)
        return int(found["bytes"]), float(found["seconds"])

    @reads_answers(HostError)
    async def clear(self, names: Collection[str]) -> list[str]:
        """Remove what these dead runs have left of weight versions; returns what is gone."""
        return [str(name) for name in await self._ask("clear", names=[*names])]

    @reads_answers(HostError)
    async def ports(
        self, first: int, last: int, count: int, taken: Collection[int] = ()
    ) -> list[int]:
        """Reserve ports until the run ends, for servers of ours (``bind_port`` of ``node.http``).

        Raises:
            HostError: there are not enough in ``[first, last]``.
        """
        answer = await self._ask("ports", first=first, last=last, count=count, taken=[*taken])
        return [int(port) for port in answer]

    @reads_answers(HostError)
    async def start(
        self,
        process: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        files: Mapping[str, str] | None = None,
        ports: Collection[int] = (),
    ) -> StartedProcess:
        """Start a process in its own session, with the marker of the run in its environment.

        ``files`` are written first, readable by their owner only, at paths below the run directory,
        which is also the default ``cwd``. ``ports`` are reserved ones that it binds without
        ``SO_REUSEPORT``: they are let go before, and taken back after it. A repeated request for a
        process that runs has no effect.

        Raises:
            ProcessError: the process cannot be started.
        """
        # A connection that drops now must not look like a process that cannot start.
        row = await self._connection.ask(
            "start",
            timeout_s=self._hello["lease_s"] + ANSWER_S,
            process=process,
            argv=[*argv],
            env=env or {},
            cwd=cwd,
            files=files or {},
            ports=[*ports],
        )
        self._exits.setdefault(_key(row), False)
        return built(StartedProcess, row)

    @reads_answers(HostError)
    async def stop(self, process: str, *, grace_s: float = 10.0) -> StoppedProcess:
        """Send SIGTERM, after ``grace_s`` SIGKILL, and verify; no effect if nothing runs."""
        limit_s = grace_s + STOP_EXTRA_S
        answer = await self._connection.ask(
            "stop", timeout_s=limit_s, process=process, grace_s=grace_s
        )
        return StoppedProcess(tuple(answer["killed"]), tuple(answer["leftovers"]))

    @reads_answers(HostError)
    async def processes(self) -> list[ProcessState]:
        """List the processes that the agent runs or has run."""
        return [built(ProcessState, row) for row in await self._ask("list")]

    async def running(self) -> frozenset[str]:
        """The names of the processes that run now."""
        rows = await self.processes()
        return frozenset(row.process for row in rows if row.state == "running")

    async def tail(self, process: str, lines: int = 20) -> str:
        """Return the last lines of a process's log."""
        return str(await self._ask("tail", process=process, lines=lines))

    @reads_answers(HostError)
    async def serve_weights(self, bind: str, port: int = 0) -> int:
        """Serve this host's weight versions to the run's hosts; return the port (0: any)."""
        return int(await self._ask("weights_serve", bind=bind, port=port))

    @reads_answers(HostError)
    async def pull(
        self,
        name: str,
        sources: Sequence[str],
        *,
        timeout_s: float = 120.0,
        size: int = 0,
        seat: Seat | None = None,
    ) -> PulledVersion:
        """Fetch a weight version from all sources (``peer_url``), the publisher's last.

        With a ``seat`` it comes by that group first. Bytes may come for as long as ``size`` of them
        take on the thinnest link.

        Raises:
            WeightsError: they did not give all of it, or nothing for ``timeout_s``.
        """
        # The agent gives up first: its answer says which source failed in what way.
        limit_s = timeout_s + ANSWER_S + size / THINNEST_BYTES_S
        more = {} if seat is None else {"seat": asdict(seat)}
        answer = await self._connection.ask(
            "pull", timeout_s=limit_s, name=name, sources=[*sources], limit_s=timeout_s, **more
        )
        return built(PulledVersion, answer)

    async def join_fabric(
        self, group: str, interface: str, rank: int, size: int, *, timeout_s: float
    ) -> str:
        """Join a process group, and return where this host's rank listens.

        Raises:
            LibraError: the host has no such interface, or does not join in time.
        """
        order = {"group": group, "interface": interface, "rank": rank, "size": size}
        return str(await self._connection.ask("fabric_join", timeout_s=timeout_s, **order))

    async def connect_fabric(self, seat: Seat) -> None:
        """Connect to all other ranks of the group, and leave it.

        Raises:
            LibraError: one cannot be reached.
        """
        await self._ask("fabric_connect", seat=asdict(seat))

    async def send_by_fabric(self, name: str, seat: Seat, *, timeout_s: float) -> None:
        """Send a weight version of this host to the other ranks of a group.

        Raises:
            LibraError: they have not taken all of it within ``timeout_s``.
        """
        limit_s = timeout_s + ANSWER_S
        await self._connection.ask(
            "fabric_send", timeout_s=limit_s, name=name, seat=asdict(seat), limit_s=timeout_s
        )

    async def damaged(self, name: str, *, size: int) -> str:
        """Return a file of a weight version that is not as its manifest says; empty if none is.

        Such a version is removed. ``size`` is its bytes, all of which are read.
        """
        limit_s = ANSWER_S + size / READ_BYTES_S
        return str(await self._connection.ask("damaged", timeout_s=limit_s, name=name))

    @reads_answers(HostError)
    async def forget(self, keep: Collection[str]) -> list[str]:
        """Remove all other weight versions of the run, and return their names."""
        return [str(name) for name in await self._ask("forget", keep=[*keep])]

    async def dial(self, path: str) -> Endpoint:
        """Return a local endpoint that leads to a Unix socket of the host."""
        return await self.transport.dial(path)

    async def _ask(self, operation: str, **arguments: object) -> Any:
        return await self._connection.ask(operation, timeout_s=ANSWER_S, **arguments)

    # -- connecting ----------------------------------------------------------------------------

    async def prepare(self, run_id: str) -> None:
        """Connect and upload, so that modules of ours can be run there; no agent is started.

        Raises:
            HostError: the host cannot be reached, trusted or used.
        """
        await self.transport.connect()
        _, digest = package()
        self.workdir, self.python = self.expand(self.workdir), self.expand(self.python)
        self.code_dir = f"{self.workdir}/code/{digest}"
        self.run_dir = f"{self.workdir}/runs/{run_id}/{self.name}"
        await put_code(self.transport, self.name, self.python, self.code_dir)

    async def _hang_up(self) -> None:
        if self._keep_task is not None:
            self._keep_task.cancel()
            await asyncio.gather(self._keep_task, return_exceptions=True)

    @reads_answers(HostError)
    async def _make_tmp(self) -> str:
        argv = ["sh", "-c", MAKE_TMP, "sh", self.run_dir]
        done = await self.transport.run(argv, timeout_s=COMMAND_S)
        if done.exit_code:
            raise HostError(
                f"{self.name}: no directory for temporary files: {done.last_words}",
                hint="its TMPDIR, or /tmp, must be writable: df -h /tmp",
            )
        return done.stdout.decode().splitlines()[-1]

    @reads_answers(HostError)
    async def _stop_and_verify(self) -> tuple[str, ...]:
        done = await self.transport.run(self._agent("stop"), timeout_s=STOP_S)
        return tuple(last_line(self.name, done)["leftovers"])

    def _agent(self, command: str) -> list[str]:
        return [*self.module_argv("libra_cli.node.agent.main"), command, self.run_dir]

    @reads_answers(HostError)
    async def _attach(self) -> list[Message]:
        """Connect to the agent and return every process that it knows of.

        Raises:
            LeaseOver: what was there before has ended, and another agent has begun.
            HostError: there is no agent, or it refuses.
        """
        stream = await self.transport.open_stream(self._agent("attach"))
        answer = await self._connection.attach(stream, self._hello, admit=self._admit)
        rows = list(answer["processes"])
        for row in rows:
            built(ProcessState, {"tail": "", "requested": False, "exit_code": None, **row})
        return rows

    async def _attach_for_good(self) -> list[Message]:
        """Attach to an agent that listens; one of a run that has just ended may be about to go."""
        pauses_s = iter(AGENT_PAUSES_S)
        while True:
            rows = await self._attach()
            # Not before: an agent that ends removes it, and keeps the next one waiting until then.
            self.tmp_dir = await self._make_tmp()
            try:
                await self.transport.reach(f"{self.tmp_dir}/agent.sock")
            except HostError as error:
                pause_s = next(pauses_s, None)
                if pause_s is None:
                    raise
                _log.info("%s: its agent does not listen: %s", self.name, _words(error))
            else:
                return rows
            await asyncio.sleep(pause_s)
            self._life = None

    def _admit(self, answer: Message) -> None:
        life = str(answer.get("life", ""))
        if self._life not in (None, life):
            raise LeaseOver(f"{self.name}: its lease was over, or it was started again")
        self._life = life

    async def _keep_connected(self, lease_s: float) -> None:
        """Keep the connection as long as the host is used, whatever happens to it."""
        loop = asyncio.get_running_loop()
        ping_interval_s = min(self._ping_interval_s, lease_s / PINGS_A_LEASE)
        while True:
            reason = await self._until_lost(ping_interval_s, lease_s)
            lost_at = loop.time()
            self._report(ConnectionLost(self.name, reason))
            try:
                rows = await self._reconnect(lost_at + lease_s)
            except HostError as error:
                await self._until_rejoined(f"{reason}: {error}")
                self._report(Rejoined(self.name, loop.time() - lost_at))
            else:
                self._report(Reconnected(self.name, loop.time() - lost_at))
                self._reconcile(rows)

    async def _until_lost(self, ping_interval_s: float, lease_s: float) -> str:
        try:
            return await self._connection.until_lost(ping_interval_s, lease_s)
        except Exception as error:  # noqa: BLE001  whatever it is, the connection is no more
            _log.exception("%s: the connection to the agent", self.name)
            return _words(error)

    async def _reconnect(self, deadline: float) -> list[Message]:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            left_s = max(deadline - loop.time(), FIRST_PAUSE_S)
            try:
                await self.transport.connect(timeout_s=min(left_s, RECONNECT_S))
                return await self._attach()
            except (HostKeyError, LeaseOver):
                raise  # another machine, or another agent, answers: it is too late
            except Exception as error:
                if loop.time() + pause_s > deadline:
                    raise HostLost(_words(error)) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _until_rejoined(self, reason: str) -> None:
        """Give the host up, and ask it from time to time until it can be used again."""
        self._connection.fail(HostLost(f"{self.name}: given up after {reason}"))
        self._life = None
        self._exits.clear()
        self._report(LeaseExpired(self.name, reason))
        pause_s = self._first_rejoin_s
        while True:
            try:
                await self._begin_anew()
                return
            except Exception as error:  # noqa: BLE001  it is asked again
                _log.info("%s cannot be used yet: %s", self.name, _words(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_REJOIN_S)

    async def _begin_anew(self) -> None:
        """Attach to a new agent, once nothing of the run is left."""
        await self.prepare(self._run_id)
        if left := await self._stop_and_verify():
            raise HostError(f"{self.name}: cannot be stopped: {', '.join(left)}")
        self.tmp_dir = await self._make_tmp()
        await self._attach()
        self._connection.restore()

    # -- events --------------------------------------------------------------------------------

    def _report(self, event: HostEvent) -> None:
        # Not at once: whoever waits for an answer that came before the event shall go first.
        asyncio.get_running_loop().call_soon(self._on_event, event)

    def _on_message(self, event: Message) -> None:
        if event["event"] == "exited":
            self._exited(event)

    def _reconcile(self, rows: Sequence[Message]) -> None:
        """Report the exits that happened while there was no connection."""
        for row in rows:
            if row["state"] == "exited":
                self._exited(row)
        known = {_key(row) for row in rows}
        for key in [key for key, reported in self._exits.items() if not reported]:
            if key not in known:  # the agent is not the one that started it
                self._exited(dict(zip(("process", "pid", "started"), key, strict=True)))

    def _exited(self, row: Message) -> None:
        if self._exits.get(_key(row)):
            return
        moved = row.get("moved_ports") or {}
        told = {"exit_code": None, "tail": "", "requested": False, **row, "node": self.name}
        told["moved_ports"] = {int(old): new for old, new in moved.items()}
        self._report(built(Exited, told))
        self._exits[_key(row)] = True


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, LibraError) else words_of(error)


def _key(row: Message) -> tuple[str, int, int]:
    return row["process"], row["pid"], row["started"]  # the kernel gives a pid again
