"""Where the commands of one sandbox run: namespaces made by bubblewrap, or a directory of the host.

A place is opened by the process that serves the sandbox, and entered by those that it forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol

from libra_cli.envs.sandbox.helper import archive, kernel, layout
from libra_cli.envs.sandbox.helper.system_calls import own_filter
from libra_cli.envs.sandbox.helper.watch import Watch
from libra_cli.envs.sandbox.spec import WORK, SandboxSpec

ALL_ENDED = "every process of the sandbox has ended; its files are still there"
OPEN_S = 30.0
"""Seconds that bubblewrap may take to start, with the files of a snapshot."""
KEEPER = 2
"""The process by which bubblewrap knows that a sandbox goes on, by its number in the sandbox."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LAST_WORDS = 2_000
_FILTER = own_filter()
"""The seccomp filter of every process of a sandbox, those of bubblewrap included."""


class PlaceFailed(Exception):
    """A sandbox cannot be opened; the message says why."""


class PlaceEnded(Exception):
    """What was to be entered has ended meanwhile, and can be revived."""


class Enclosure(Protocol):
    """What a sandbox's commands are started in."""

    spec: SandboxSpec
    news: str
    """What has happened to all processes since the last call; empty if nothing has."""
    closed: bool
    """Whether processes in it see no other's, so that those without a parent are its own."""
    work: str
    """The directory that commands begin in."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that every command has."""

    def revive(self) -> None:
        """Start it again, with the files it had, if all its processes have been killed.

        Raises:
            PlaceFailed: it cannot be started.
        """

    def watch(self) -> bool:
        """Kill every process if there are too many, or if they have too much memory together.

        It says whether there is anything to be watched.
        """

    def enter(self) -> None:
        """Move this process, which was forked for it, into the place, without any right.

        Raises:
            PlaceEnded: all its processes have been killed.
        """

    def end_processes(self) -> None:
        """Kill every process in it; it has not ended before those are reaped by their parents."""

    @property
    def ended(self) -> bool:
        """Whether every process of it is gone."""

    def wait_ended(self) -> None:
        """Wait until every process of it is gone."""

    def settled(self) -> bool:
        """Say whether it goes on; if something in it has ended it, kill the rest of it.

        This process has entered it. Whoever waits for the end reaps its own children first.
        """

    def pack(self, file: int) -> None:
        """Write its files into an open file; raises OSError. This process must have been forked."""

    def close(self) -> None:
        """End all of it."""


def open_place(spec: SandboxSpec, program: str, snapshot: int | None) -> Enclosure:
    """Open a sandbox, with the files of an archive.

    Raises:
        PlaceFailed: it cannot be opened.
    """
    place = OnHost(spec) if spec.backend == "none" else InNamespaces(spec, program)
    if isinstance(place, InNamespaces):
        place.start(snapshot)
    elif snapshot is not None:
        _in_a_child(lambda: place.unpack(snapshot))
    return place


class InNamespaces:
    """A place that bubblewrap makes."""

    closed = True
    work = WORK

    def __init__(self, spec: SandboxSpec, program: str) -> None:
        self.spec = spec
        self._program = program
        self._namespaces: tuple[int, int] | None = None
        """Descriptors of the user and the mount namespace that hold the files."""
        self._monitor = self._init = self._stdin = -1
        """Descriptors: bubblewrap's process, process 1 of the sandbox, and what keeps it."""
        self._processes = ""
        """The directory of the host in which the sandbox's /proc is seen."""
        self._watch = Watch(spec.limits)
        self.news = ""

    @property
    def environment(self) -> Mapping[str, str]:
        name = "root" if self.spec.user == 0 else layout.USER
        return {
            "HOME": WORK,
            "LANG": "C.UTF-8",
            "PATH": _PATH,
            "TERM": "dumb",
            "USER": name,
        }

    def start(self, snapshot: int | None = None) -> None:
        """Start bubblewrap, and wait until the sandbox is there; raises PlaceFailed."""
        stdin, self._stdin = os.pipe()
        ready, said = os.pipe()
        errors, wrong = os.pipe()
        info, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            _exec_or_say(lambda: self._begin(snapshot, (stdin, said, wrong), told), wrong)
        for fd in (stdin, said, wrong, told):
            os.close(fd)
        try:
            self._monitor = os.pidfd_open(pid)
            if not _line_within(ready, OPEN_S):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise PlaceFailed(_rest(errors) or "bubblewrap ended without a word")
            init = json.loads(_rest(info))["child-pid"]
            self._init = os.pidfd_open(init)
            self._processes = f"/proc/{init}/root/proc"
            if self._namespaces is None:
                self._namespaces = (_namespace(pid, "user"), _namespace(pid, "mnt"))
        except OSError as error:
            raise PlaceFailed(f"it ended as it began: {error.strerror}") from error
        finally:
            for fd in (ready, errors, info):
                os.close(fd)

    def _begin(self, snapshot: int | None, stdio: tuple[int, int, int], told: int) -> None:
        """Make the sandbox's files, and become bubblewrap."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self._namespaces is None:
            layout.enter_new_namespaces(self.spec.limits.disk_mb)
            if snapshot is None:
                layout.furnish(self.spec)
            else:
                _in_a_child(lambda: _unpack_into(layout.FILES, snapshot))
            if self.spec.root is not None:
                layout.lay_over(self.spec.root)
        else:
            self._enter_files()
        layout.make_way(self.spec)
        kernel.end_with_parent()
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        os.set_inheritable(told, True)
        argv = layout.bubblewrap(self._program, self.spec, told, _file_with(_FILTER))
        os.execve(argv[0], argv, {})

    def _enter_files(self) -> None:
        assert self._namespaces is not None
        user, mount = self._namespaces
        kernel.setns(user, kernel.NEW_USER)
        kernel.setns(mount, kernel.NEW_MOUNT)

    def revive(self) -> None:
        if not self.ended:
            return
        for fd in (self._monitor, self._init, self._stdin):
            os.close(fd)
        self.start()
        self.news = self.news or ALL_ENDED

    def watch(self) -> bool:
        why = self._watch.objection(self._processes)
        if why:
            self.news = f"{ALL_ENDED} ({why})"
            self.end_processes()
            # The next call would enter what still ends, be asked again, and no longer learn why.
            self.wait_ended()
        return self._watch.busy

    def enter(self) -> None:
        kinds = kernel.EVERY_NAMESPACE
        if self.spec.network:  # that of the host, where this process is already
            kinds &= ~kernel.NEW_NETWORK
        try:
            kernel.setns(self._init, kinds)
        except OSError as error:
            raise PlaceEnded from error
        import_nothing_more()
        kernel.drop_capabilities()
        kernel.refuse_system_calls(_FILTER)

    def end_processes(self) -> None:
        _kill(self._init)

    @property
    def ended(self) -> bool:
        return _ended(self._init, 0.0)

    def wait_ended(self) -> None:
        _ended(self._init, OPEN_S)

    def settled(self) -> bool:
        if not _is_killed(KEEPER) and not self.ended:
            return True
        self.end_processes()
        return False

    def pack(self, file: int) -> None:
        self._enter_files()
        os.chroot(layout.FILES)
        os.chdir("/")
        import_nothing_more()
        with os.fdopen(file, "wb", closefd=False) as writer:
            archive.pack(writer)

    def close(self) -> None:
        os.close(self._stdin)
        for fd in (self._init, self._monitor):
            _kill(fd)
            _ended(fd, OPEN_S)


class OnHost:
    """A directory of the host, which keeps nobody in."""

    closed = False

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.news = ""
        self.work = tempfile.mkdtemp(prefix="libra-sandbox-")

    @property
    def environment(self) -> Mapping[str, str]:
        passed = {name: os.environ[name] for name in ("PATH", "LANG", "USER") if name in os.environ}
        return passed | {"HOME": self.work, "TERM": "dumb"}

    def revive(self) -> None:
        return

    def watch(self) -> bool:
        return False

    def enter(self) -> None:
        os.chdir(self.work)

    def end_processes(self) -> None:
        return

    @property
    def ended(self) -> bool:
        return False

    def wait_ended(self) -> None:
        return

    def settled(self) -> bool:
        return True

    def pack(self, file: int) -> None:
        with os.fdopen(file, "wb", closefd=False) as writer:
            archive.pack(writer, self.work)

    def unpack(self, file: int) -> None:
        """Write the files of an archive into the directory; raises OSError."""
        _unpack(file, self.work)

    def close(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)


def import_nothing_more() -> None:
    """Keep this process from importing what a sandbox has written: its files are the root now."""
    sys.meta_path.clear()
    sys.path.clear()


def _unpack_into(top: str, file: int) -> None:
    os.chroot(top)
    os.chdir("/")
    import_nothing_more()
    _unpack(file, "/")


def _unpack(file: int, top: str) -> None:
    archive.unpack(archive.reader(file), top)


def _in_a_child(do: Callable[[], None]) -> None:
    """Do something in a process of its own, and wait for it.

    Raises:
        PlaceFailed: it could not be done.
    """
    errors, wrong = os.pipe()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _exec_or_say(do, wrong)
    os.close(wrong)
    said = _rest(errors)
    os.close(errors)
    _, status = os.waitpid(pid, 0)
    signal.signal(signal.SIGCHLD, before)
    if status:
        raise PlaceFailed(said)


def _file_with(content: bytes) -> int | None:
    """Return a descriptor that the next program inherits and reads this from; None of nothing."""
    if not content:
        return None
    file = os.memfd_create("libra", 0)
    os.write(file, content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _exec_or_say(do: Callable[[], None], wrong: int) -> NoReturn:
    """Do something and end; if it fails, write why and end with code 1."""
    code = 1
    try:
        do()
        code = 0
    except BaseException as error:  # noqa: BLE001  nothing else may go on in this process
        told = str(error) if isinstance(error, PlaceFailed | OSError) else repr(error)
        os.write(wrong, told.encode()[:_LAST_WORDS])
    finally:
        os._exit(code)


def _line_within(fd: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        data = os.read(fd, 1024)
        if not data:
            return False
        if b"\n" in data:
            return True
    return False


def _rest(fd: int) -> str:
    data = b""
    while more := os.read(fd, 4096):
        data += more
    return data.decode(errors="replace").strip()


def _namespace(pid: int, kind: str) -> int:
    return os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _is_killed(pid: int) -> bool:
    """Whether a process of this /proc has ended, or ends as soon as it is given a processor.

    On a host at work that is later than the end of others that the same call has killed.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            told = dict(line.split(b":", 1) for line in file)
    except OSError:
        return True
    pending = int(told[b"SigPnd"], 16) | int(told[b"ShdPnd"], 16)
    return told[b"State"].split()[0] == b"Z" or bool(pending >> (signal.SIGKILL - 1) & 1)


def _ended(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
