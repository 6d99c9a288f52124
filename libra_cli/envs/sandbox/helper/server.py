"""The helper of a process with sandboxes: one process that forks another for every sandbox.

    the process      one thread or many; each sandbox is a socket
      helper         forks, and ends with the process, however that ends
        server       one sandbox: its namespaces, and what keeps them; ends with its socket
          bwrap      and the sandbox; ends with the server
          call       one command, one shell or one file; it is forked, enters and answers

None of them has a thread, as one that enters a user namespace must not. They have nothing of the
process in their memory or their variables but its marks, and if it is root, they are nobody.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from libra_cli.envs.sandbox.helper import commands, files, kernel, ports, shells
from libra_cli.envs.sandbox.helper.place import Enclosure, PlaceEnded, PlaceFailed, open_place
from libra_cli.envs.sandbox.messages import ConnectionOver, receive, send
from libra_cli.envs.sandbox.spec import SandboxSpec

NOBODY = 65534
"""The uid and gid of everything that root's sandboxes do, but those without bubblewrap."""
_FDS = 4
_WATCH_S = 1.0


def main(parent: int, channel: int) -> None:
    """Fork a server for each sandbox that process ``parent`` asks for by a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the whole of its group
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.disable()
    gc.freeze()  # no page is written to, and so copied, in what is forked
    watched = os.pidfd_open(parent)
    if os.getppid() != parent:
        return
    with socket.socket(fileno=channel) as asked:
        while (fds := _next(asked, watched)) is not None:
            _fork_server(asked, fds)
    # Whatever still serves ends with its socket.


def _fork_server(asked: socket.socket, fds: list[int]) -> None:
    """Serve a new sandbox in a process of its own."""
    try:
        pid = os.fork()
    except OSError as error:
        with socket.socket(fileno=fds[0]) as channel:
            if calls := _next(channel):
                _refuse(calls, error)
        return
    if pid == 0:
        asked.close()
        _serve_and_end(fds[0])
    _close(fds)


def _refuse(fds: list[int], error: OSError) -> None:
    """Answer a call for which no process can be forked; whatever else there is goes on."""
    with socket.socket(fileno=fds[0]) as caller, contextlib.suppress(ConnectionOver):
        receive(caller)  # what is closed unread, its other end cannot read from either
        send(caller, {"failed": f"no process can be started on this host: {error.strerror}"})
    _close(fds[1:])


def _next(asked: socket.socket, other: int = -1) -> list[int] | None:
    """Wait for the descriptors of a message; None once there are no more, or ``other`` says so."""
    poll = select.poll()
    for fd in (asked.fileno(), other):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    if other in {fd for fd, _ in poll.poll()}:
        return None
    try:
        data, fds, _, _ = socket.recv_fds(asked, 1, _FDS)
    except ConnectionError:
        return None
    return fds if data else None


def _next_watching(asked: socket.socket, place: Enclosure) -> list[int] | None:
    """Wait for the next call, and look after what the last ones have left running."""
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    while not poll.poll(_WATCH_S * 1000) and place.watch():
        pass
    return _next(asked)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _serve_and_end(channel: int) -> NoReturn:
    try:
        kernel.end_with_parent()
        kernel.adopt_orphans()
        with socket.socket(fileno=channel) as asked:
            _serve(asked)
    finally:
        os._exit(0)


def _serve(asked: socket.socket) -> None:
    """Open the sandbox that the first call describes, and fork for each call after it."""
    fds = _next(asked)
    if fds is None:
        return
    with socket.socket(fileno=fds[0]) as caller:
        try:
            place = _opened(caller, fds[1:])
        except (PlaceFailed, OSError) as error:
            with contextlib.suppress(ConnectionOver):
                send(caller, {"failed": str(error)})
            return
        with contextlib.suppress(ConnectionOver):
            send(caller, {"work": place.work})
    try:
        while (fds := _next_watching(asked, place)) is not None:
            _answer(place, asked, fds)
    finally:
        place.close()


def _opened(caller: socket.socket, fds: list[int]) -> Enclosure:
    told, _ = receive(caller)
    spec = SandboxSpec.of(told["spec"])
    if spec.backend != "none":
        if os.geteuid() == 0:
            kernel.become_nobody(NOBODY)
            kernel.end_with_parent()  # which another user's process has to ask for again
        kernel.let_nobody_look(hidden=True)
    try:
        return open_place(spec, told["program"], fds[0] if fds else None)
    finally:
        _close(fds)


def _answer(place: Enclosure, asked: socket.socket, fds: list[int]) -> None:
    """Answer one call in a process of its own."""
    failed = ""
    try:
        place.revive()
    except (PlaceFailed, OSError) as error:
        failed = str(error)
    try:
        pid = os.fork()
    except OSError as error:
        _refuse(fds, error)
        return
    if pid != 0:
        _close(fds)
        place.news = ""
        return
    try:
        asked.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with socket.socket(fileno=fds[0]) as caller:
            _call(place, caller, fds[1:], failed)
    finally:
        os._exit(0)


def _call(place: Enclosure, caller: socket.socket, fds: list[int], failed: str) -> None:
    with contextlib.suppress(ConnectionOver):
        try:
            if failed:
                raise PlaceFailed(failed)
            told, body = receive(caller)
            answer = _done(place, told, body, caller, fds)
            if answer is not None:
                send(caller, {"news": place.news, **answer[0]}, answer[1])
        except PlaceFailed as error:
            send(caller, {"failed": str(error)})
        except PlaceEnded:
            send(caller, {"again": True, "news": place.news})
        except OSError as error:
            send(caller, {"errno": error.errno, "error": error.strerror, "path": error.filename})
        except MemoryError:
            send(caller, {"failed": "this host has no memory left"})


def _done(
    place: Enclosure, told: dict[str, Any], body: bytes, caller: socket.socket, fds: list[int]
) -> tuple[dict[str, Any], bytes] | None:
    """Do what was asked; returns the answer, None of what answers itself."""
    kind: str = told["call"]
    match kind:
        case "run":
            return commands.run(place, told, body, caller)
        case "shell":
            shells.serve_shell(place, told, caller)
            return None
        case "read":
            return {}, files.read(place, told)
        case "write":
            files.write(place, told, body)
        case "end_processes":
            place.end_processes()
            place.wait_ended()
        case "snapshot":
            place.pack(fds[0])
        case "listen":
            with socket.socket(fileno=fds[0]) as channel:
                ports.listen(place, channel)
        case _:
            raise PlaceFailed(f"there is no call {kind!r}")
    return {}, b""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
