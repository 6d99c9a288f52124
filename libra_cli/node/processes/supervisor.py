"""Starts, watches and stops the processes of one run on one host.

Guarantees
    Own session    Each process leads its own session, writes to its own log and carries the marker.
    Exited is gone An exit is reported only when nothing of the process is left: the orphans of a
                   leader that died (vLLM's engine and workers outlive their server and hold GPU
                   memory) are stopped first, so whoever hears of the exit may start anew at once.
    Never others   Only processes that carry the marker, or are in the session of a leader that has
                   not been reaped, are signalled. Until a leader is reaped the kernel gives its pid
                   to no other process, so the session is ours even where a child has cleared its
                   environment.

The running processes are also written to ``processes.json``: if the agent dies, its successor takes
them over from there. It is not their parent then, so it polls once a second and cannot know their
exit codes. What the file lacks, because it is damaged or the disk was full, is found by its marker.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from libra_cli.config.errors import NONSENSE
from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.credentials import CREDENTIALS
from libra_cli.node.processes import proc
from libra_cli.node.processes.agent_log import LOG
from libra_cli.node.processes.cores import PLACES, bound_to
from libra_cli.node.processes.log_rotation import rotate
from libra_cli.node.processes.ports import PORTS, Ports
from libra_cli.node.processes.private_files import private, write_private
from libra_cli.node.processes.proc import Marker, ProcessIdentity, boot_id

POLL_S = 0.05
ORPHANS_GRACE_S = 2.0
KILL_S = 10.0
"""How long to repeat SIGKILL. Only a process stuck in the kernel outlives the first round."""
CLEANERS_S = 1.0
"""How much longer a process that ignores SIGTERM may live than those that are killed. It may be one
that cleans up: Python's resource tracker unlinks the shared memory of vLLM's dead processes."""
TAIL_BYTES = 64 * 1024
RECORD = "processes.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class StopResult:
    """The pids that had to be killed, and descriptions of the processes that are still there."""

    killed: tuple[int, ...] = ()
    leftovers: tuple[str, ...] = ()


@dataclass(slots=True)
class Child:
    """One named process. ``popen`` is None if an earlier agent was its parent."""

    name: str
    identity: ProcessIdentity
    log: Path
    log_start: int
    """The offset in bytes at which this process began to write: names, and logs, are used again."""
    digest: str
    """Hash of the request that started it: the same request again is answered, not repeated."""
    popen: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None
    requested: bool = False
    ports: tuple[int, ...] = ()
    """What was released for it, and is reserved again when it has ended."""
    moved_ports: dict[int, int] = field(default_factory=dict)
    """For each port that somebody else has by then, the one for the next start."""
    stop_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    reaped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_exited(self) -> bool:
        """Whether the leader has ended. A child of this agent stays unreaped and keeps its pid."""
        if self.popen is None:
            return not self.identity.alive
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.identity.pid, options) is not None

    def describe(self) -> dict[str, object]:
        """Return the process's state for the controller; once it has ended, with its log's end."""
        ended = self.reaped.is_set()
        return {
            "process": self.name,
            **asdict(self.identity),
            "log": str(self.log),
            "state": "exited" if ended else "running",
            "exit_code": self.exit_code,
            "requested": self.requested,
            "moved_ports": self.moved_ports,
            "tail": tail(self.log, 20, since=self.log_start) if ended else "",
        }


class Supervisor:
    """Starts and stops the processes of one run. ``report`` is called with every exit."""

    def __init__(
        self, run_dir: Path, marker: Marker, report: Callable[[dict[str, object]], None]
    ) -> None:
        self._run_dir = run_dir
        self._marker = marker
        self._report = report
        self.ports = Ports(run_dir / PORTS)
        self._children: dict[str, Child] = {}
        self._reaping: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Take over the processes of an earlier agent, and listen for exits."""
        with suppress(OSError):  # a full disk: then a start fails, and says so
            (self._run_dir / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ports.open()
        found = {child.name: child for child in self._found()}
        for child in self._recorded():  # which says more of what it knows
            if child.identity.alive or child.name not in found:
                found[child.name] = child
        self._children = found
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap_exited)
        if self._children:
            self._watch = asyncio.create_task(self._poll_adopted())

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        files: Mapping[str, str],
        ports: Sequence[int] = (),
    ) -> Child:
        """Start a process. One that already runs from the same request is returned as it is.

        ``files`` are written first, at paths below the run directory. ``ports`` are reserved ones
        that the process binds in a way that needs them free.

        Raises:
            AgentRefused: the request is wrong, another process of this name runs, or the process
                cannot be started.
        """
        if not NAME.fullmatch(name):
            raise AgentRefused("request", f"{name!r} is no name for a process")
        digest = _digest(argv, env, cwd, files)
        known = self._children.get(name)
        if known is not None and not known.reaped.is_set():
            if known.digest == digest and not known.requested:
                return known
            raise AgentRefused("start", f"{name} is still running as pid {known.identity}")
        self.ports.release(ports)
        try:
            child = self._spawn(name, argv, {**env}, cwd or str(self._run_dir), files)
        except OSError as error:
            self.ports.release(self.ports.take_back(ports).values())
            reason = f"{name}: {error.filename or argv[0]}: {error.strerror}"
            raise AgentRefused(
                "disk" if error.errno == errno.ENOSPC else "start", reason
            ) from error
        child.digest, child.ports = digest, tuple(ports)
        self._children[name] = child
        self._record()
        return child

    async def stop(self, name: str, grace_s: float) -> StopResult:
        """Send SIGTERM, after ``grace_s`` SIGKILL, and verify that nothing is left.

        A name that this agent never started may still have orphans.
        """
        child = self._children.get(name)
        if child is None or child.reaped.is_set():
            return await self._stop_members(lambda: self._marked(name), grace_s)
        child.requested = True
        result = await self._stop_child(child, grace_s)
        if not result.leftovers:
            self._reap_exited()
            await child.reaped.wait()
        return result

    async def stop_all(self, grace_s: float) -> StopResult:
        """Stop all processes at once, then whatever else carries the marker."""
        stops = [self.stop(name, grace_s) for name in self._children]
        results = await asyncio.gather(*stops)
        rest = await self._stop_members(lambda: set(self._marker.marked_processes()), grace_s)
        killed = sorted({pid for one in (*results, rest) for pid in one.killed})
        return StopResult(tuple(killed), rest.leftovers)

    @property
    def is_busy(self) -> bool:
        return any(not child.reaped.is_set() for child in self._children.values())

    def describe(self) -> list[dict[str, object]]:
        """Describe every process, running and ended, for the controller."""
        return [child.describe() for child in self._children.values()]

    async def rotate_logs(self) -> None:
        """Keep every log within its bound, beside other work: a slow disk takes long to copy."""
        logs = [*(self._run_dir / "logs").glob("*.log"), self._run_dir / LOG]
        cut = await asyncio.to_thread(rotate, logs)
        for child in self._children.values():
            if child.log in cut:
                child.log_start = 0

    def tail(self, name: str, lines: int) -> str:
        """Return the last lines of a log, which all processes of this name have written."""
        return tail(self._log(name), lines)

    def _spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: dict[str, str],
        cwd: str,
        files: Mapping[str, str],
    ) -> Child:
        for path, text in files.items():
            self._write(path, text)
        log = self._log(name)
        with open(log, "ab", opener=private) as output, bound_to(env.get(PLACES, "")):
            log_start = output.tell()
            popen = subprocess.Popen(
                argv,
                cwd=cwd,
                env={**os.environ, **env, **self._environment(name)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        born = proc.status(popen.pid)
        assert born is not None, "an unreaped child has a status"
        return Child(name, born.identity, log, log_start, digest="", popen=popen)

    def _environment(self, name: str) -> dict[str, str]:
        return {
            **self._marker.environment(name),
            "LIBRA_TOKEN_FILE": str(self._run_dir / "token"),
            "LIBRA_CREDENTIALS_FILE": str(self._run_dir / CREDENTIALS),
            "PYTHONUNBUFFERED": "1",
            # setproctitle, which vLLM calls, writes titles over the environment and so over the
            # marker, unless told not to.
            "SPT_NOENV": "1",
        }

    def _write(self, path: str, text: str) -> None:
        target = (self._run_dir / path).resolve()
        if not target.is_relative_to(self._run_dir.resolve()):
            raise AgentRefused("request", f"{path} is outside the run directory")
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(target, text)

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    # -- exits ---------------------------------------------------------------------------------

    def _reap_exited(self) -> None:
        for child in self._children.values():
            known = child.name in self._reaping or child.reaped.is_set()
            if not known and child.has_exited:
                self._reaping[child.name] = asyncio.create_task(self._reap(child))

    async def _reap(self, child: Child) -> None:
        """Stop the orphans while the leader still holds its pid; only then reap the leader."""
        result = await self._stop_child(child, ORPHANS_GRACE_S)
        if child.popen is not None:
            child.exit_code = child.popen.wait()
        child.moved_ports = self.ports.take_back(child.ports)
        child.reaped.set()
        del self._reaping[child.name]
        self._record()
        self._report({"event": "exited", **child.describe(), "leftovers": result.leftovers})

    async def _poll_adopted(self) -> None:
        while any(one.popen is None and not one.reaped.is_set() for one in self._children.values()):
            self._reap_exited()
            await asyncio.sleep(1.0)

    async def _stop_child(self, child: Child, grace_s: float) -> StopResult:
        # A stop that is under way has granted its own grace: reaping must not cut it short.
        async with child.stop_lock:
            return await self._stop_members(lambda: self._members(child), grace_s)

    def _members(self, child: Child) -> set[ProcessIdentity]:
        members = self._marked(child.name)
        if child.popen is not None and child.popen.returncode is None:
            session = (one for one in proc.statuses() if one.session == child.identity.pid)
            members |= {one.identity for one in session if one.state not in "ZX"}
        return members

    def _marked(self, name: str) -> set[ProcessIdentity]:
        return {one for one, process in self._marker.marked_processes().items() if process == name}

    async def _stop_members(
        self, members: Callable[[], set[ProcessIdentity]], grace_s: float
    ) -> StopResult:
        deadline = time.monotonic() + grace_s
        killed: set[int] = set()
        seen: set[ProcessIdentity] = set()
        # A dying process loses its environment before its GPU memory, so a process that was seen
        # once is waited for by identity, not by marker.
        while present := members() | {one for one in seen if one.alive}:
            overdue_s = time.monotonic() - deadline
            if overdue_s >= KILL_S:
                break
            late, cleaned = overdue_s >= 0, overdue_s >= CLEANERS_S
            to_kill = {one for one in present if late and (cleaned or not one.ignores_term)}
            for one in to_kill:
                proc.send(one, signal.SIGKILL)
            for one in present - seen - to_kill:
                proc.send(one, signal.SIGTERM)
            killed |= {one.pid for one in to_kill}
            seen |= present
            await asyncio.sleep(POLL_S)
        return StopResult(tuple(sorted(killed)), tuple(str(one) for one in present))

    # -- processes.json ------------------------------------------------------------------------

    def _record(self) -> None:
        """Write down the running processes, for an agent that has to take over."""
        rows = [
            {
                "name": child.name,
                **asdict(child.identity),
                "log_start": child.log_start,
                "digest": child.digest,
            }
            for child in self._children.values()
            if not child.reaped.is_set()
        ]
        with suppress(OSError):  # on a full disk: a successor finds them by their marker
            record = json.dumps({"boot": boot_id(), "processes": rows})
            write_private(self._run_dir / RECORD, record)

    def _recorded(self) -> list[Child]:
        """What an earlier agent of this boot has written; nothing of a damaged file."""
        try:
            record = json.loads((self._run_dir / RECORD).read_bytes())
            rows = record["processes"] if record["boot"] == boot_id() else []
            return [
                Child(
                    str(row["name"]),
                    ProcessIdentity(int(row["pid"]), int(row["started"])),
                    self._log(row["name"]),
                    int(row["log_start"]),
                    str(row["digest"]),
                )
                for row in rows
            ]
        except (OSError, *NONSENSE):
            return []

    def _found(self) -> list[Child]:
        """The leaders of sessions that carry the marker and that an agent of this run started."""
        found = self._marker.marked_processes()
        leaders = [one.identity for one in proc.statuses() if one.session == one.identity.pid]
        return [
            Child(found[one], one, self._log(found[one]), _size(self._log(found[one])), digest="")
            for one in leaders
            if one in found and proc.has_token_file(one.pid)
        ]


def tail(log: Path, lines: int, *, since: int = 0) -> str:
    """Return the last lines of a log file, at most 64 KiB of it, from byte ``since`` on."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _digest(*request: object) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0
