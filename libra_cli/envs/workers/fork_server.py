"""Imports an environment once, and forks a worker for every episode.

The controller starts it with its frames on stdin and stdout, and tells it first which environment
it serves, with its arguments and secrets, so that none is on a command line. It makes one
environment, so that what is loaded once is loaded here and shared by all workers, and then only
forks, passes frames on and counts. It runs nothing else of the environment, and has one thread, as
a process that forks must. Where importing the environment starts threads, workers are started anew
instead, and import it themselves.

    a worker crashes          its episode ends, with how it ended and what it last printed
    it hangs                  the controller abandons the call; the process is killed a grace
                              after the episode is closed
    it prints                 the last of it is kept for an error message
    it starts processes       they are killed with it, unless they leave its group; so are those
                              that importing it has started, with this process
    the controller ends       workers are closed, and killed after that grace
    this process is killed    the kernel kills the workers
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.protocol import Environment
from libra_cli.envs.sandbox.client import share_helper
from libra_cli.envs.workers import wire, worker
from libra_cli.envs.workers.wire import Frames, Kind

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 unless they are set: a process with several threads cannot fork, and it is the workers
that share the cores."""
LAST_WORDS = 1_000
"""Characters of what a worker printed that are told if it crashes."""
_READ = 1 << 18


@dataclass(slots=True)
class _Worker:
    episode: int
    pid: int
    channel: socket.socket
    ending: int
    """A descriptor of the process, readable when it has ended."""
    output: int
    """The descriptor of what it prints."""
    frames: Frames = field(default_factory=Frames)
    unsent: bytearray = field(default_factory=bytearray)
    said: bytearray = field(default_factory=bytearray)
    closed: bool = False
    deadline: float = float("inf")
    """When to kill it, by the monotonic clock."""
    fault: str = ""
    """Why it was killed; empty if it was not."""


class ForkServer:
    """The workers of one environment on one machine."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        """Frames come from one descriptor and go to the other."""
        self._incoming, self._outgoing = incoming, outgoing
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}
        self._pid = os.getpid()
        self._hello = b""
        self._grace_s = 0.0
        self._name = ""
        self._make: Callable[[], Environment] | None = None

    def serve(self) -> None:
        """Fork and pass on until the controller goes."""
        frames = Frames()
        self._watch(self._incoming, lambda: self._take(frames))
        _many_files()
        while self._incoming >= 0 or self._workers:
            for key, _ in self._selector.select(self._patience()):
                # Of a worker that has ended meanwhile, the number may be another's by now.
                if self._selector.get_map().get(key.fd) == key:
                    key.data()
            self._kill_overdue()

    def _watch(self, fd: int, ready: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def _patience(self) -> float | None:
        first = min((one.deadline for one in self._workers.values()), default=float("inf"))
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    # -- the controller -------------------------------------------------------------------------

    def _take(self, frames: Frames) -> None:
        data = os.read(self._incoming, _READ)
        if not data:
            self._selector.unregister(self._incoming)
            self._incoming = -1
            for one in list(self._workers.values()):
                self._close(one)
            return
        for kind, episode, body in frames.feed(data):
            self._happened(kind, episode, body)

    def _happened(self, kind: Kind, episode: int, body: bytes) -> None:
        if kind is Kind.HELLO:
            self._load(body)
            return
        one = self._workers.get(episode)
        if kind is Kind.CLOSE:
            if one is not None:
                self._close(one)
            return
        try:
            self._send(one or self._begin(episode), wire.frame(kind, episode, body))
        except OSError as error:  # the machine has no memory, processes or descriptors left
            words = f"no process can be started for it: {error.strerror}"
            self._answer(Kind.ENDED, episode, wire.pack(words))

    def _answer(self, kind: Kind, episode: int, body: bytes) -> None:
        rest = memoryview(wire.frame(kind, episode, body))
        # A controller that is gone is noticed where its frames are read.
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            while rest:
                rest = rest[os.write(self._outgoing, rest) :]

    def _load(self, body: bytes) -> None:
        hello = wire.unpack(body)
        self._name, self._hello = hello["name"], wire.frame(Kind.HELLO, 0, body)
        self._grace_s = hello["grace_s"]
        broke: list[str] = []
        try:
            make = worker.maker(hello)
            _load_once(make(), own_tasks=hello["own_tasks"])
            self._make = make if _threads() == 1 else None
            if self._make is not None and (hello["sandbox"] or {}).get("backend") == "bubblewrap":
                share_helper()
        except EnvironmentBroken as error:
            broke = [str(error), error.hint]
        except BaseException as error:  # noqa: BLE001  other people's code
            why = f"{type(error).__name__}: {error}"
            broke = [f"environment {self._name!r} broke in its factory: {why}", ""]
        gc.collect()
        gc.freeze()  # or the collector would write to, and so copy, every page of every worker
        self._answer(Kind.HELLO, 0, wire.pack(broke))

    # -- the workers ----------------------------------------------------------------------------

    def _begin(self, episode: int) -> _Worker:
        with contextlib.ExitStack() as unless_begun:
            channel, theirs = socket.socketpair()
            unless_begun.callback(channel.close)
            with theirs:
                output, printed = os.pipe()
                unless_begun.callback(os.close, output)
                try:
                    pid = self._start(channel, theirs, output, printed)
                finally:
                    os.close(printed)
            unless_begun.callback(_reap, pid)
            ending = os.pidfd_open(pid)
            unless_begun.pop_all()
        channel.setblocking(False)
        one = _Worker(episode, pid, channel, ending, output)
        self._workers[episode] = one
        self._watch(channel.fileno(), lambda: self._exchange(one))
        self._watch(one.output, lambda: self._listen(one))
        self._watch(one.ending, lambda: self._ended(one))
        if self._make is None:
            self._send(one, self._hello)
        return one

    def _start(
        self, channel: socket.socket, theirs: socket.socket, output: int, printed: int
    ) -> int:
        if self._make is None:
            return _spawned(theirs, printed)
        pid = os.fork()
        if pid == 0:
            self._become_worker(theirs, printed, self._make, [channel.fileno(), output])
        return pid

    def _become_worker(
        self,
        channel: socket.socket,
        printed: int,
        make: Callable[[], Environment],
        others: list[int],
    ) -> NoReturn:
        code = 1
        try:
            # A group, to be killed as one, but not a session: the kernel gives each session as much
            # of a core as the controller's.
            os.setpgid(0, 0)
            worker.end_with(self._pid)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            self._selector.close()
            for one in self._workers.values():
                others += [one.channel.fileno(), one.ending, one.output]
            for fd in (*others, printed, self._incoming, self._outgoing):
                os.close(fd)
            _draw_anew()
            worker.serve(channel, self._name, make)
            code = 0
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _send(self, one: _Worker, frame: bytes) -> None:
        one.unsent += frame
        self._flush(one)

    def _flush(self, one: _Worker) -> None:
        """Send what a worker takes; the rest when it takes more."""
        try:
            while one.unsent:
                del one.unsent[: one.channel.send(one.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            one.unsent.clear()  # it has ended, which is told by its own descriptor
        key = self._selector.get_map().get(one.channel.fileno())
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.unsent else 0)
        if key is not None and key.events != wanted:
            self._selector.modify(key.fd, wanted, key.data)

    def _exchange(self, one: _Worker) -> None:
        if one.unsent:
            self._flush(one)
        self._relay(one)

    def _relay(self, one: _Worker) -> None:
        """Pass a worker's answers on to the controller; kill the worker if they cannot be read."""
        try:
            data = one.channel.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(one.channel.fileno())
            return
        try:
            for kind, _, body in one.frames.feed(data):
                self._answer(kind, one.episode, body)
        except ValueError as error:
            self._selector.unregister(one.channel.fileno())
            self._kill(one, f"its process sent what cannot be read: {error}")

    def _listen(self, one: _Worker) -> None:
        data = os.read(one.output, _READ)
        if not data:
            self._selector.unregister(one.output)
        one.said += data
        del one.said[: -4 * LAST_WORDS]

    def _close(self, one: _Worker) -> None:
        if not one.closed:
            one.closed = True
            one.deadline = time.monotonic() + self._grace_s
            self._send(one, wire.frame(Kind.CLOSE, one.episode))

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for one in self._workers.values():
            if one.deadline <= now:
                self._kill(one, "it did not end when it was closed")

    def _kill(self, one: _Worker, why: str) -> None:
        one.fault = one.fault or why
        one.deadline = float("inf")
        _kill_group(one.pid)

    def _ended(self, one: _Worker) -> None:
        """Tell the last answers and the end, and leave nothing of the process."""
        for fd, drain in ((one.channel.fileno(), self._relay), (one.output, self._listen)):
            while fd in self._selector.get_map() and _readable(fd):
                drain(one)
        # Not reaped yet, so the number of its group is still its own.
        _kill_group(one.pid)
        _, status = os.waitpid(one.pid, 0)
        for fd in (one.channel.fileno(), one.output, one.ending):
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
        one.channel.close()
        os.close(one.output)
        os.close(one.ending)
        del self._workers[one.episode]
        words = "" if one.closed else _end_of(one, os.waitstatus_to_exitcode(status))
        self._answer(Kind.ENDED, one.episode, wire.pack(words))


def _load_once(environment: Environment, *, own_tasks: bool) -> None:
    """Have what is loaded on first use loaded here, and let go of the environment."""
    if own_tasks and not inspect.iscoroutinefunction(environment.task):
        with contextlib.suppress(Exception):  # told by the first episode
            environment.task(0, 0)
    close = getattr(environment, "close", None)
    if callable(close):
        with contextlib.suppress(Exception):
            closing: Any = close()
            if inspect.iscoroutine(closing):
                asyncio.run(closing)


def _threads() -> int:
    """Threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def _spawned(channel: socket.socket, printed: int) -> int:
    """Start a worker that imports the environment itself; returns its pid."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {worker.__name__} import main; main()"
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-c", code, str(os.getpid())],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, printed, 1),
            (os.POSIX_SPAWN_DUP2, printed, 2),
            # Last: it may take the number of the others.
            (os.POSIX_SPAWN_DUP2, channel.fileno(), worker.SPAWNED_SOCKET),
        ],
        setpgroup=0,
    )


def _readable(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(0))


def _kill_group(pid: int) -> None:
    # A worker leads a group of its own. One that has only just begun may not do so yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _reap(pid: int) -> None:
    _kill_group(pid)
    os.waitpid(pid, 0)


def _draw_anew() -> None:
    """Give each worker numbers of its own; Python's ``random`` sees to that itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _end_of(one: _Worker, code: int) -> str:
    by = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    said = one.said.decode(errors="replace").strip()[-LAST_WORDS:]
    why = one.fault or f"its process {by}"
    return f"{why}; it last printed: {said}" if said else why


def _many_files() -> None:
    """Allow three descriptors for every episode that the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Serve the controller on stdin and stdout, and have all that is printed elsewhere."""
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    with contextlib.suppress(PermissionError):  # it leads its session, and so a group
        os.setpgid(0, 0)
    try:
        ForkServer(incoming, outgoing).serve()
    except BaseException:  # noqa: BLE001  told here, since nothing comes after this
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # With all that the environment has started while it was loaded, which may hold our stderr.
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
