"""The helper process of this one, and calls to the sandboxes that it makes.

It is started with the first sandbox, whichever thread opens that, and anew in a process that was
forked since, unless it was shared before (``share_helper``). It is no child that anybody waits for:
it ends when this process does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from libra_cli.config.errors import SandboxBroken
from libra_cli.envs.sandbox.messages import ConnectionOver, receive, send
from libra_cli.envs.sandbox.spec import SandboxSpec

INSTALL = "apt-get install bubblewrap"
ALLOW = (
    "as root: sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=100000 "
    "kernel.apparmor_restrict_unprivileged_userns=0 (those that this host knows)"
)
_REFUSALS = ("not permitted", "namespace", "permission denied", "unshare", "no space left")
"""Words by which a host is known that allows no namespaces, or no more of them."""
_MODULE = "libra_cli.envs.sandbox.helper.server"
_CLOSE_S = 60.0
_ATTEMPTS, _PAUSE_S = 20, 0.05
KEEPS_ENDING = "the processes of the sandbox are killed as soon as they are started"
_NOT_MINE = "a sandbox belongs to the process that has opened it"


class _Helper:
    """One helper process, and the socket over which it is asked for sandboxes."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.shared = False
        """Whether processes that were forked from this one ask it too."""
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = f"import sys; sys.path[:] = {sys.path!r}; from {_MODULE} import main; "
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", f"{code}main({self.owner}, {fd})"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[fd],
                env={name: value for name, value in os.environ.items() if _may_see(name)},
            )

    @property
    def alive(self) -> bool:
        if self.owner != os.getpid():
            return self.shared  # it ends with its owner, or fails to make a channel
        return self._process.poll() is None

    def channel(self) -> socket.socket:
        """Return the socket of a new server.

        Raises:
            OSError: the helper has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._asked, [b"+"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End it, with every sandbox; only for the end of this process."""
        if self.owner == os.getpid():
            self._asked.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)


_lock = threading.Lock()
_helpers: list[_Helper] = []
"""At most one, kept when this process was forked, too, as it is then the parent's."""


def _new_channel() -> socket.socket:
    with _lock:
        if _helpers and _helpers[0].alive:
            with contextlib.suppress(OSError):  # it has ended just now
                return _helpers[0].channel()
        _helpers[:] = [_Helper()]
        return _helpers[0].channel()


def share_helper() -> None:
    """Have the processes that this one will fork open their sandboxes by its own helper.

    Each sandbox still ends with the process that has opened it, by its socket; all of them end with
    this process. A helper of each would cost 9 MiB and the start of a Python.
    """
    with _lock:
        if not _helpers or not _helpers[0].alive:
            _helpers[:] = [_Helper()]
        _helpers[0].shared = True


# A fork may happen while another thread holds the lock.
os.register_at_fork(after_in_child=lambda: _renew())


def _renew() -> None:
    global _lock
    _lock = threading.Lock()


@atexit.register
def _close_helper() -> None:
    for helper in _helpers:
        helper.close()


def _may_see(name: str) -> bool:
    """No secret of this process, but the marks by which a host finds what a run has left."""
    return name in ("PATH", "LANG", "USER", "LIBRA_RUN", "LIBRA_NODE", "LIBRA_PROCESS")


class CallEnded(SandboxBroken):
    """The process that answers a call has ended without an answer."""


class SandboxChannel:
    """The server of one sandbox, which takes any number of calls at the same time."""

    def __init__(self, spec: SandboxSpec, snapshot: int | None = None) -> None:
        """Open a sandbox.

        Raises:
            SandboxBroken: the host cannot have it, with what to do about that as its hint.
        """
        self._owner = os.getpid()
        self.news = ""
        """What has happened to all processes of the sandbox, for the next command to tell."""
        program = shutil.which("bwrap") or ""
        if spec.backend == "bubblewrap" and not program:
            raise SandboxBroken("a sandbox needs bubblewrap, and there is no bwrap", hint=INSTALL)
        for path in filter(None, (*spec.readable, spec.root)):
            if spec.backend == "bubblewrap" and not os.path.exists(path):
                raise SandboxBroken(
                    f"this host has no {path}, which environment.sandbox shows",
                    hint="install it there (libra help agents), or leave it out of the recipe",
                )
        try:
            self._channel = _new_channel()
        except OSError as error:
            raise SandboxBroken(f"a sandbox cannot be opened: {error}") from error
        try:
            with self.begin([] if snapshot is None else [snapshot]) as call:
                answer, _ = self.ask(call, {"spec": spec.as_json(), "program": program})
        except BaseException:
            self._channel.close()
            raise
        self.work: str = answer["work"]

    def begin(self, fds: Sequence[int] = ()) -> socket.socket:
        """Return the socket of a new call.

        Raises:
            SandboxBroken: the sandbox was closed, or its server has ended.
        """
        if self._owner != os.getpid():
            raise SandboxBroken(_NOT_MINE)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._channel, [b"+"], [theirs.fileno(), *fds])
            except OSError as error:
                ours.close()
                raise SandboxBroken("the sandbox is closed") from error
        return ours

    def ask(
        self, call: socket.socket, told: Mapping[str, Any], body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        """Send what a call is of, and wait for the answer.

        Raises:
            CallEnded: nobody answers it any more.
            SandboxBroken: the sandbox could not do it.
            OSError: a file of the sandbox cannot be read or written.
        """
        try:
            send(call, told, body)
            answer, data = receive(call)
        except ConnectionOver as error:
            raise CallEnded("the sandbox's server has ended") from error
        self.news = answer.get("news") or self.news
        if "failed" in answer:
            why = str(answer["failed"])
            refused = any(word in why.lower() for word in _REFUSALS)
            raise SandboxBroken(f"the sandbox broke: {why}", hint=ALLOW if refused else "")
        if "errno" in answer:
            raise OSError(answer["errno"], answer["error"], answer["path"])
        return answer, data

    def call(
        self, told: Mapping[str, Any], body: bytes = b"", fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], bytes]:
        """Make one call, and wait for its answer; raises as ``begin`` and ``ask`` do."""
        call, answer, data = self._answered(told, body, fds)
        call.close()
        return answer, data

    def open_call(self, told: Mapping[str, Any]) -> socket.socket:
        """Make a call that goes on after its first answer; raises as ``begin`` and ``ask`` do."""
        return self._answered(told)[0]

    def _answered(
        self, told: Mapping[str, Any], body: bytes = b"", fds: Sequence[int] = ()
    ) -> tuple[socket.socket, dict[str, Any], bytes]:
        for _ in range(_ATTEMPTS):
            call = self.begin(fds)
            try:
                answer, data = self.ask(call, told, body)
            except BaseException:
                call.close()
                raise
            if "again" not in answer:
                return call, answer, data
            call.close()
            time.sleep(_PAUSE_S)
        raise SandboxBroken(KEEPS_ENDING)

    def close(self) -> None:
        """End the sandbox, and wait until all of it is gone."""
        if self._owner == os.getpid() and self._channel.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)
                self._channel.settimeout(_CLOSE_S)
                self._channel.recv(1)
        self._channel.close()
