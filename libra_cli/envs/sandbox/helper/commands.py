"""Runs a command in a place: starts it, keeps a bounded part of what it writes, and ends it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from libra_cli.envs.sandbox.helper import kernel, processes
from libra_cli.envs.sandbox.helper.place import ALL_ENDED, Enclosure, PlaceEnded

FLOOD_BYTES = 64 << 20
"""A command that writes more than this is ended; somebody must read all of it."""
FLOODED = f"it was ended, as it had written more than {FLOOD_BYTES >> 20} MiB"
_READ = 1 << 16
_NOT_FOUND = 127
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

    child: subprocess.Popen[bytes]
    pidfd: int
    stdin: int
    proc: int
    """The directory /proc of the host, from before this process entered the sandbox."""
    outputs: dict[int, Output] = field(default_factory=dict)
    """What was read, by the descriptors that are still open."""
    status: int = -1
    """What only this process reads from, not the reader of its output; -1 if there is none."""

    @property
    def within(self) -> int:
        """The process's number in the sandbox; 0 if the host does not tell."""
        with contextlib.suppress(OSError):
            fd = os.open(f"{self.child.pid}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc)
            with os.fdopen(fd, "rb") as file:
                numbers = [line.split() for line in file if line.startswith(b"NSpid:")]
            return int(numbers[0][-1])
        return 0

    @property
    def written(self) -> int:
        """Bytes that were read of the descriptors that are still open."""
        return sum(one.size for one in self.outputs.values())

    def exit_code(self) -> int:
        """Reap it, once it has ended; of one that a signal has ended 128 and the signal."""
        code = self.child.wait()
        return code if code >= 0 else 128 - code


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
    proc = enter(place)
    out, err = Output(limits.output_bytes), Output(limits.output_bytes)
    try:
        running = start(place, proc, order(place, told), out, err)
    except OSError as error:
        said = f"{error.filename or 'fork'}: {error.strerror}\n".encode(errors="replace")
        return asdict(CommandReply(_NOT_FOUND, 0)), said
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
        place.wait_ended()
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
    cwd = os.path.join(place.work, told.get("cwd") or "").rstrip("/") or "/"
    if cwd == place.work and not os.path.isdir(cwd):
        cwd = "/"  # somebody in the sandbox has removed it, and shall see what that is like
    return Order(argv, cwd, {**place.environment, "PWD": cwd, **(told.get("env") or {})})


def enter(place: Enclosure) -> int:
    """Move this process into a place for good, with its limits; returns the host's /proc.

    Raises:
        PlaceEnded: all processes of the place have been killed.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    place.enter()
    # What it starts has them from it: so nothing of this process is copied to set them there.
    kernel.limit(place.spec.limits, own_processes=place.closed)
    # Of a terminal, for the whole of its group; a handler is not passed on.
    signal.signal(signal.SIGINT, lambda *_: None)
    return proc


def start(place: Enclosure, proc: int, what: Order, out: Output, err: Output | None) -> Running:
    """Start a command in the place that this process has entered.

    Without ``err`` its descriptor 2 is for this process, as ``Running.status``.

    Raises:
        OSError: it cannot be started.
        PlaceEnded: nor can anything, as all processes of the place are killed.
    """
    stdin, fed = os.pipe()
    stdout, said = os.pipe()
    stderr, wrong = os.pipe()
    try:
        child = subprocess.Popen(
            what.argv,
            stdin=stdin,
            stdout=said,
            stderr=wrong,
            cwd=what.cwd,
            env=what.env,
            start_new_session=True,
            umask=0o022,
        )
    except OSError as error:
        if not place.settled():
            place.wait_ended()  # who asks again would enter what still ends
            raise PlaceEnded from error
        raise
    finally:
        for fd in (stdin, said, wrong):
            os.close(fd)
    for fd in (fed, stdout, stderr):
        os.set_blocking(fd, False)
    outputs = {stdout: out} if err is None else {stdout: out, stderr: err}
    status = stderr if err is None else -1
    return Running(child, os.pidfd_open(child.pid), fed, proc, outputs, status)


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
    root = running.within
    if not root or not processes.end_all(place, root, since):
        place.end_processes()
