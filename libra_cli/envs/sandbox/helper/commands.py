"""Runs a command in a place: starts it, keeps a bounded part of what it writes, and ends it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn

from libra_cli.envs.sandbox.helper import kernel, processes
from libra_cli.envs.sandbox.helper.place import ALL_ENDED, Enclosure

FLOOD_BYTES = 64 << 20
"""A command that writes more than this is ended; somebody must read all of it."""
FLOODED = f"it was ended, as it had written more than {FLOOD_BYTES >> 20} MiB"
_READ = 1 << 16
_NOT_FOUND = 127
_ASIDE = 200
Why = Literal["ready", "timeout", "flood", "abandoned"]


class Output:
    """What was written to one descriptor: the first half of a limit, and the last."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._half + _READ:
            del self._tail[: -self._half]

    @property
    def truncated(self) -> bool:
        return self.size > 2 * self._half

    def taken(self) -> bytes:
        """Return what is kept, with a line where something is left out."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        left_out = self.size - 2 * self._half
        told = f"\n[... {left_out:,} bytes left out ...]\n".encode()
        return bytes(self._head + told + self._tail[-self._half :])


@dataclass(frozen=True, slots=True)
class Order:
    """What is started: a program with its arguments, directory and variables."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]


@dataclass(slots=True)
class Running:
    """A command that was started; its descriptors are of this process."""

    pid: int
    """The process's number here."""
    within: int
    """The process's number in the sandbox."""
    pidfd: int
    stdin: int
    outputs: dict[int, Output] = field(default_factory=dict)
    """What was read, by the descriptors that are still open."""
    status: int = -1
    """What only this process reads from, not the reader of its output; -1 if there is none."""

    @property
    def written(self) -> int:
        """Bytes that were read of the descriptors that are still open."""
        return sum(one.size for one in self.outputs.values())

    def exit_code(self) -> int:
        """Reap it, once it has ended; of one that a signal has ended 128 and the signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        for fd in (self.pidfd, self.stdin, self.status, *self.outputs):
            if fd >= 0:
                os.close(fd)


@dataclass(frozen=True, slots=True)
class CommandReply:
    """What is told of a command; what it wrote follows, stdout first."""

    code: int
    stdout_bytes: int
    timed_out: bool = False
    truncated: bool = False
    note: str = ""
    ended: bool = False
    """Whether a shell has ended, so that another one must be started."""


def run(
    place: Enclosure, told: Mapping[str, Any], stdin: bytes, caller: socket.socket
) -> tuple[dict[str, Any], bytes]:
    """Run a command to its end, or until its time is over; returns a reply and its bytes."""
    limits = place.spec.limits
    since = processes.now_in_ticks()
    place.enter()
    out, err = Output(limits.output_bytes), Output(limits.output_bytes)
    running = start(place, order(place, told), out, err)
    feeding = Feeding(running.stdin, stdin)
    running.stdin = -1
    seconds = told.get("timeout_s") or limits.time_s
    why = pump(running, running.pidfd, time.monotonic() + seconds, caller, feeding)
    notes = [FLOODED] if why == "flood" else []
    if why != "ready":
        end(place, running, since)
    drain(running)
    code = running.exit_code()
    if not place.settled():
        notes.append(ALL_ENDED)
    stdout, stderr = out.taken(), err.taken()
    reply = CommandReply(
        code,
        len(stdout),
        timed_out=why == "timeout",
        truncated=out.truncated or err.truncated,
        note="; ".join(notes),
    )
    return asdict(reply), stdout + stderr


def order(place: Enclosure, told: Mapping[str, Any]) -> Order:
    """Read what a caller wants to be started."""
    command = told["command"]
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    cwd = os.path.join(place.work, told["cwd"]) if told.get("cwd") else place.work
    return Order(argv, cwd, {**place.environment, "PWD": cwd, **(told.get("env") or {})})


def start(
    place: Enclosure, what: Order, out: Output, err: Output | None, status: int = -1
) -> Running:
    """Start a command in the place that this process has entered; without ``err`` both are one.

    Of its descriptors 0, 1 and 2 are open, and ``status``, if it is given, to be read from here.
    """
    stdin, fed = os.pipe()
    stdout, said = os.pipe()
    stderr, wrong = os.pipe() if err is not None else (-1, said)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        fds = {0: stdin, 1: said, 2: wrong} | ({status: tell} if status >= 0 else {})
        _become(place, what, fds, tell)
    for fd in {stdin, said, wrong, tell}:
        os.close(fd)
    within = int(os.read(told, 16) or b"0")
    outputs = {stdout: out} | ({stderr: err} if err is not None else {})
    for fd in (fed, *outputs):
        os.set_blocking(fd, False)
    running = Running(pid, within, os.pidfd_open(pid), fed, outputs)
    if status >= 0:
        os.set_blocking(told, False)
        running.status = told
    else:
        os.close(told)
    return running


def _become(place: Enclosure, what: Order, fds: Mapping[int, int], tell: int) -> NoReturn:
    """Become the command, in a session of its own."""
    code = _NOT_FOUND
    try:
        os.write(tell, b"%16d" % os.getpid())
        os.setsid()
        # First out of the way of the numbers that they shall have.
        aside = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, _ASIDE) for number, fd in fds.items()}
        for number, fd in aside.items():
            os.dup2(fd, number)
        for first, last in _between(sorted(fds)):
            os.closerange(first, last)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.umask(0o022)
        kernel.limit(place.spec.limits, own_processes=place.closed)
        _enter_directory(what.cwd, place.work)
        _execute(what)
    except OSError as error:
        name = error.filename or what.argv[0]
        os.write(2, f"{name}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _enter_directory(path: str, work: str) -> None:
    try:
        os.chdir(path)
    except FileNotFoundError:
        if path != work:
            raise
        os.chdir("/")  # somebody in the sandbox has removed it, and shall see what that is like


def _execute(what: Order) -> None:
    argv = list(what.argv)
    program = argv[0]
    path = what.env.get("PATH", "") if "/" not in program else ""
    tried = [f"{place}/{program}" for place in path.split(":")] if path else [program]
    for one in tried[:-1]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.execve(one, argv, dict(what.env))
    try:
        os.execve(tried[-1], argv, dict(what.env))
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), program) from error


def _between(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges of descriptors between and after these, each without its end."""
    ends = [*numbers[1:], 1 << 20]
    return [(one + 1, end) for one, end in zip(numbers, ends, strict=True)]


class Feeding:
    """Bytes on their way to a command's stdin, which is closed after them."""

    def __init__(self, fd: int, data: bytes) -> None:
        self.fd, self._rest = fd, memoryview(data)
        if not data:
            self._close()

    def go_on(self) -> bool:
        """Write what it takes now; says whether there is more."""
        try:
            self._rest = self._rest[os.write(self.fd, self._rest[:_READ]) :]
        except BlockingIOError:
            return True
        except OSError:  # it reads no more
            self._rest = memoryview(b"")
        if not self._rest:
            self._close()
        return self.fd >= 0

    def _close(self) -> None:
        os.close(self.fd)
        self.fd = -1


def pump(
    running: Running,
    awaited: int,
    deadline: float,
    caller: socket.socket,
    feeding: Feeding | None = None,
) -> Why:
    """Read what a command writes until a descriptor is readable; says why it went no further."""
    poll = select.poll()
    ends: dict[int, Why] = {awaited: "ready", caller.fileno(): "abandoned"}
    for fd in (*ends, *running.outputs):
        poll.register(fd, select.POLLIN)
    if feeding and feeding.fd >= 0:
        poll.register(feeding.fd, select.POLLOUT)
    while (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            if fd in ends:
                return ends[fd]
            if not (feeding.go_on() if feeding and fd == feeding.fd else _read(running, fd)):
                poll.unregister(fd)
        if running.written > FLOOD_BYTES:
            return "flood"
    return "timeout"


def _read(running: Running, fd: int) -> bool:
    """Read once; says whether the descriptor is still open."""
    try:
        data = os.read(fd, _READ)
    except BlockingIOError:
        return True
    if data:
        running.outputs[fd].add(data)
    else:
        os.close(fd)
        del running.outputs[fd]
    return bool(data)


def drain(running: Running) -> None:
    """Read what a command has written before now, but no more than ``FLOOD_BYTES``."""
    for fd, output in list(running.outputs.items()):
        most = output.size + FLOOD_BYTES
        while fd in running.outputs and output.size < most:
            before = output.size
            _read(running, fd)
            if output.size == before:
                break


def end(place: Enclosure, running: Running, since: int) -> None:
    """Kill all that a command has started; if there is no end of it, everything in the place."""
    if not processes.end_all(place, running.within, since):
        place.end_processes()
