"""Sandboxes, in which environments run what a model has written.

    with open_sandbox(SandboxSpec()) as sandbox:
        sandbox.write("/work/fib.py", b"print(21)")
        done = sandbox.run("python3 fib.py", timeout_s=5)
        assert (done.code, done.stdout) == (0, "21\\n")

Calls block, and may come from any thread, several at a time; a coroutine uses
``asyncio.to_thread``. A sandbox belongs to the process that opened it, and ends with that.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.envs.sandbox.client import CallEnded, SandboxChannel
from libra_cli.envs.sandbox.messages import KILLED
from libra_cli.envs.sandbox.spec import SandboxSpec

_ATTEMPTS = 3
_CHUNK = 1 << 30
READ_BYTES = 1 << 20
"""Bytes that ``Sandbox.read`` returns, unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended, and what it wrote."""

    code: int
    """The exit code; 128 and the signal, if one has ended it; 127 if it could not be started."""
    stdout: str
    """What it wrote, as UTF-8, without what is over ``SandboxLimits.output_bytes``. Of a shell,
    stderr is among it."""
    stderr: str = ""
    timed_out: bool = False
    """Whether it was ended as its time was over."""
    truncated: bool = False
    """Whether something of stdout or stderr is left out."""
    note: str = ""
    """What else has happened: why it was ended, or that a shell was started anew."""


class Snapshot:
    """The files that a sandbox had written at one moment, for others to begin with."""

    def __init__(self, fd: int) -> None:
        """Take over the descriptor of an archive."""
        self.fd = fd

    def save(self, path: Path) -> None:
        """Write the archive into a file, from which another process can ``load`` it."""
        with path.open("wb") as file:
            at = 0
            while sent := os.sendfile(file.fileno(), self.fd, at, _CHUNK):
                at += sent

    @classmethod
    def load(cls, path: Path) -> Snapshot:
        """Return a snapshot that was saved; raises OSError."""
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Let go of the archive, which is removed if it was not saved."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class Sandbox:
    """Processes and files that see nothing of the host but what ``SandboxSpec`` names."""

    def __init__(self, spec: SandboxSpec, channel: SandboxChannel) -> None:
        """Use a sandbox that ``open_sandbox`` has opened."""
        self.spec = spec
        self.work = channel.work
        """The directory that commands begin in; relative paths are relative to it."""
        self._channel = channel
        self._shells: list[Shell] = []

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Completed:
        """Run a command, a text by ``/bin/sh``, and wait for its end; what it leaves goes on.

        Raises:
            SandboxBroken: the sandbox is closed, or its host can do no more.
        """
        told = {"call": "run", **_wanted(command, timeout_s, cwd, env)}
        answer, body = self._channel.call(told, stdin)
        return _completed(self._channel, answer, body)

    def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Make a file or replace what is in it; missing directories are made.

        Raises:
            OSError: it cannot be written within the sandbox.
            SandboxBroken: the sandbox is closed, or its host can do no more.
        """
        self._channel.call({"call": "write", "path": path, "mode": mode}, data)

    def read(self, path: str, limit: int = READ_BYTES) -> bytes:
        """Return the first ``limit`` bytes of a file, as the sandbox's own processes see it.

        Raises:
            OSError: there is no such file within the sandbox.
            SandboxBroken: the sandbox is closed, or its host can do no more.
        """
        return self._channel.call({"call": "read", "path": path, "limit": limit})[1]

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Shell:
        """Return a shell, which is started with its first command."""
        shell = Shell(self._channel, _wanted("", None, cwd, env))
        self._shells.append(shell)
        return shell

    def listen(self) -> socket.socket:
        """Return a socket that listens on a port of the sandbox's loopback, for this process.

        What runs in the sandbox connects to that port, and is answered from outside: the one way
        out that it has without a network. It is over with the sandbox's last process.

        Raises:
            OSError: there is no port.
            SandboxBroken: the sandbox is closed, or its host can do no more.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._channel.call({"call": "listen"}, fds=[theirs.fileno()])
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=fds[0])

    def end_processes(self) -> None:
        """Kill every process of the sandbox, shells too; files stay. ``none`` ends nothing.

        Raises:
            SandboxBroken: the sandbox is closed, or its host can do no more.
        """
        self._channel.call({"call": "end_processes"})

    def snapshot(self) -> Snapshot:
        """Copy the files that the sandbox has written until now; processes are not copied.

        Raises:
            OSError: this host has no room for it.
            SandboxBroken: the sandbox is closed, or its host can do no more.
        """
        with tempfile.TemporaryFile() as file:
            self._channel.call({"call": "snapshot"}, fds=[file.fileno()])
            return Snapshot(os.dup(file.fileno()))

    def close(self) -> None:
        """End every process of the sandbox, and wait until they and the files are gone."""
        for shell in self._shells:
            shell.close()
        self._channel.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Shell:
    """A shell that takes one command after the other, and keeps its directory and variables.

    A command whose time is over is interrupted, and the shell goes on. If the shell itself has
    ended, the next command has a new one, and its ``note`` says so.
    """

    def __init__(self, channel: SandboxChannel, wanted: Mapping[str, Any]) -> None:
        self._channel = channel
        self._wanted = wanted
        self._call: socket.socket | None = None
        self._ended = False

    def run(self, command: str, *, timeout_s: float | None = None) -> Completed:
        """Run a command in the shell; stderr is among stdout, in the order of writing.

        Raises:
            OSError: no shell can be started within the sandbox, as it has too many processes, or
                one that kills it.
            SandboxBroken: the sandbox is closed, or its host can do no more.
        """
        told = {"command": command, "timeout_s": timeout_s}
        answer, body = self._asked_of_this_one(told)
        for _ in range(_ATTEMPTS):
            if "again" not in answer:
                break
            self.close()  # the shell had ended by itself
            answer, body = self._ask(told)
        if "again" in answer:
            self.close()
            raise OSError(errno.ECANCELED, KILLED)
        notes = [ANEW] if self._ended else []
        self._ended = False
        if answer["ended"]:
            self.close()
        return _completed(self._channel, answer, body, *notes)

    def _asked_of_this_one(self, told: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Ask the shell; one that ended with all processes of the sandbox may not say so itself."""
        lived = self._call is not None
        try:
            return self._ask(told)
        except CallEnded:
            if not lived:
                raise
            return {"again": True}, b""

    def _ask(self, told: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        if self._call is None:
            self._call = self._channel.open_call({**self._wanted, "call": "shell"})
        try:
            return self._channel.ask(self._call, told)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the shell and what it runs; the next command has a new one."""
        if self._call is not None:
            self._call.close()
            self._call, self._ended = None, True


ANEW = "the shell was started anew, as the last one had ended: it has no variables of that"


def open_sandbox(spec: SandboxSpec, base: Snapshot | None = None) -> Sandbox:
    """Open a sandbox, with the files of a snapshot of another that had the same ``root``.

    Raises:
        SandboxBroken: the host cannot have it, with what to do about that as its hint.
    """
    return Sandbox(spec, SandboxChannel(spec, None if base is None else base.fd))


def _wanted(
    command: str | Sequence[str],
    timeout_s: float | None,
    cwd: str | None,
    env: Mapping[str, str] | None,
) -> dict[str, Any]:
    argv = command if isinstance(command, str) else [os.fspath(word) for word in command]
    return {"command": argv, "timeout_s": timeout_s, "cwd": cwd, "env": dict(env or {})}


def _completed(
    channel: SandboxChannel, answer: Mapping[str, Any], body: bytes, *notes: str
) -> Completed:
    size = answer["stdout_bytes"]
    news, channel.news = channel.news, ""
    return Completed(
        answer["code"],
        body[:size].decode(errors="replace"),
        body[size:].decode(errors="replace"),
        answer["timed_out"],
        answer["truncated"],
        "; ".join(filter(None, (news, *notes, answer["note"]))),
    )
