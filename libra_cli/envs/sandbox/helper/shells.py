"""A shell that stays: it takes one command after the other, and keeps its directory and variables.

The shell is an interactive one without a terminal, so that an interrupt ends the command and not
the shell. It tells the end of each command on a descriptor of its own, with the command's number.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from libra_cli.envs.sandbox.helper import processes
from libra_cli.envs.sandbox.helper.commands import (
    FLOODED,
    CommandReply,
    Order,
    Output,
    drain,
    end,
    enter,
    order,
    pump,
    start,
)
from libra_cli.envs.sandbox.helper.place import ALL_ENDED, Enclosure, PlaceEnded
from libra_cli.envs.sandbox.messages import KILLED, ConnectionOver, receive, send

_STATUS = 9
_PROGRAMS = ("/bin/bash", "/usr/bin/bash")
_BEGIN = "PS1= PS2= PROMPT_COMMAND=; unset HISTFILE; set +o history +H 2>/dev/null"
_BEGIN_S = 10.0
_GRACE_S = 0.5
_TIMED_OUT = 130
_KILLED = 128 + 9


def serve_shell(place: Enclosure, told: Mapping[str, Any], caller: socket.socket) -> None:
    """Start a shell, and run what its caller sends until either of the two ends.

    Raises:
        PlaceEnded: all processes of the place have been killed as it began.
        OSError: only the shell has been killed, or ends by itself.
    """
    shell = _Shell(place, enter(place), told)
    reply = shell.run(_BEGIN, _BEGIN_S, caller, quoted=False)[0]
    if ALL_ENDED in reply["note"]:
        raise PlaceEnded
    if reply["ended"] and not reply["timed_out"]:
        code = reply["code"]
        why = KILLED if code == _KILLED else f"it ends as it starts, with exit status {code}"
        raise OSError(errno.ECANCELED, why)
    send(caller, {"ended": reply["ended"], "news": place.news})
    try:
        while not shell.ended:
            lives = shell.wait_for(caller)
            wanted, _ = receive(caller)
            if not lives:
                send(caller, {"again": True})
                break
            seconds = wanted.get("timeout_s") or place.spec.limits.time_s
            send(caller, *shell.run(wanted["command"], seconds, caller))
    except ConnectionOver:
        pass
    finally:
        shell.close()


class _Shell:
    def __init__(self, place: Enclosure, proc: int, told: Mapping[str, Any]) -> None:
        self._place = place
        bash = next((path for path in _PROGRAMS if os.path.exists(path)), "")
        argv = [bash, "--noprofile", "--norc", "--noediting", "-i"] if bash else ["/bin/sh", "-i"]
        # One output, and what was the other is for the ends of commands.
        wrapped = ["/bin/sh", "-c", f'exec {_STATUS}>&2 2>&1; exec "$@"', "sh", *argv]
        wanted = order(place, {**told, "command": wrapped})
        env = {**wanted.env, "PS1": "", "PS2": ""}
        self._begun = processes.now_in_ticks()
        what = Order(wrapped, wanted.cwd, env)
        self._running = start(place, proc, what, Output(1), None)
        (self._stdout,) = self._running.outputs
        self._number = 0
        self._told = b""
        self.ended = False

    def run(
        self, command: str, seconds: float, caller: socket.socket, *, quoted: bool = True
    ) -> tuple[dict[str, Any], bytes]:
        """Run one command; returns a reply and what it wrote to stdout and stderr, as one."""
        running, since = self._running, processes.now_in_ticks()
        output = Output(self._place.spec.limits.output_bytes)
        running.outputs[self._stdout] = output
        self._number += 1
        # Whatever the command does with descriptors, it has no hold of the shell's own.
        line = f"eval {shlex.quote(command)} </dev/null {_STATUS}>&-" if quoted else command
        self._tell(f"{line}\necho {self._number} $? >&{_STATUS}\n")
        why, code = self._await(time.monotonic() + seconds, caller)
        notes = [FLOODED] if why == "flood" else []
        if why != "ready":
            code = self._stop(since, caller)
            if self.ended:
                end(self._place, running, since)
        if self.ended:
            ended_with = running.exit_code()
            code = ended_with if why == "ready" else code
        drain(running)
        stdout = output.taken()
        if not self._place.settled():
            self.ended = True
            running.exit_code()  # the sandbox's end waits for that of its last process
            self._place.wait_ended()
            notes.append(ALL_ENDED)
        note = "; ".join(notes)
        reply = CommandReply(
            code, len(stdout), why == "timeout", output.truncated, note, self.ended
        )
        return asdict(reply), stdout

    def wait_for(self, caller: socket.socket) -> bool:
        """Wait until the caller says something; says whether the shell lives.

        One that ends is reaped at once, or its sandbox could not end.
        """
        poll = select.poll()
        for fd in (caller.fileno(), self._running.pidfd):
            poll.register(fd, select.POLLIN)
        if self._running.pidfd in {fd for fd, _ in poll.poll()}:
            self._running.exit_code()
            self.ended = True
        return not self.ended

    def close(self) -> None:
        """End the shell, if it lives, with all that it has started."""
        if not self.ended:
            end(self._place, self._running, self._begun)
            self._running.exit_code()

    def _await(self, deadline: float, caller: socket.socket) -> tuple[str, int]:
        """Wait until the shell tells the command's end, or ends."""
        while True:
            why = pump(self._running, self._running.status, deadline, caller)
            if why != "ready":
                return why, _TIMED_OUT
            data = os.read(self._running.status, 4096)
            if not data:
                self.ended = True
                return why, 0
            self._told += data
            while b"\n" in self._told:
                line, _, self._told = self._told.partition(b"\n")
                number, code = line.split()
                if int(number) == self._number:
                    return why, int(code)

    def _stop(self, since: int, caller: socket.socket) -> int:
        """Interrupt the command, at last with its shell; returns the command's code."""
        root, place = self._running.within, self._place
        for by_force in (False, True):
            if by_force:
                processes.end_all(place, root, since, spare_root=True)
            processes.interrupt(place, root, since)
            # A shell that is interrupted may forget what it has read ahead.
            self._tell(f"echo {self._number} {_TIMED_OUT} >&{_STATUS}\n")
            why, _ = self._await(time.monotonic() + _GRACE_S, caller)
            if why == "ready":
                return _TIMED_OUT
        self.ended = True
        return _TIMED_OUT

    def _tell(self, text: str) -> None:
        os.set_blocking(self._running.stdin, True)
        with contextlib.suppress(BrokenPipeError):  # its end is told where it is waited for
            os.write(self._running.stdin, text.encode(errors="surrogateescape"))
