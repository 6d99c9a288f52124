"""Identifies the processes of a run through /proc, and signals exactly those.

A pid alone does not identify a process, since the kernel reuses it; a pid together with its start
time does. The environment tells to which run a process belongs: everything libra starts inherits a
marker of run, node and process name, which survives being orphaned, a new session and the death of
the agent.

Limit: a process that clears its environment *and* leaves its session is no longer recognised. That
is the price of the guarantee that processes of others are never touched.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process's pid and start time, which no other process has until the next boot."""

    pid: int
    started: int
    """The start time in clock ticks since boot; field 22 of ``/proc/<pid>/stat``."""

    @property
    def alive(self) -> bool:
        """Whether the process still runs. A zombie does not: it holds neither memory nor a GPU."""
        now = status(self.pid)
        return now is not None and now.identity == self and now.state not in "ZX"

    @property
    def ignores_term(self) -> bool:
        """Whether the process is alive and ignores SIGTERM."""
        now = status(self.pid)
        return now is not None and now.identity == self and now.ignores_term

    def __str__(self) -> str:
        return f"{self.pid} ({command(self.pid)})"


@dataclass(frozen=True, slots=True)
class Status:
    """What libra reads of a process in ``/proc/<pid>/stat``."""

    identity: ProcessIdentity
    state: str
    session: int
    ignores_term: bool


@dataclass(frozen=True, slots=True)
class Marker:
    """The run and the node that every process of theirs names in its environment."""

    run: str
    node: str

    @classmethod
    def of(cls, run_dir: Path) -> Marker:
        """Return the marker of a run directory, ``<work directory>/runs/<run id>/<node>``."""
        return cls(run_dir.parent.name, run_dir.name)

    def environment(self, process: str) -> dict[str, str]:
        """Return the marker as environment variables for a process of this name."""
        return {"LIBRA_RUN": self.run, "LIBRA_NODE": self.node, "LIBRA_PROCESS": process}

    def process_of(self, pid: int) -> str | None:
        """Return the process name in a process's environment; None without this marker."""
        environment = _environment(pid)
        if (environment.get("LIBRA_RUN"), environment.get("LIBRA_NODE")) != (self.run, self.node):
            return None
        return environment.get("LIBRA_PROCESS")

    def marked_processes(self) -> dict[ProcessIdentity, str]:
        """Return the name of every living process with this marker, but of the caller's own."""
        # The identity is read before the environment: if the pid changes hands in between, the
        # identity is that of the dead owner, and a signal to it goes nowhere.
        living = (one.identity for one in statuses() if one.state not in "ZX")
        named = ((identity, self.process_of(identity.pid)) for identity in living)
        return {one: name for one, name in named if name is not None and one.pid != os.getpid()}


def status(pid: int) -> Status | None:
    """Read the status of a process; None if there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses, which may hold blanks and parentheses itself.
    state, *rest = text.rpartition(")")[2].split()
    ignored = int(rest[29]) >> (signal.SIGTERM - 1) & 1
    return Status(
        ProcessIdentity(pid, int(rest[18])), state, session=int(rest[2]), ignores_term=bool(ignored)
    )


def statuses() -> Iterator[Status]:
    """Read the status of every process that this user can see, zombies included."""
    for entry in os.listdir(PROC):
        if entry.isdigit() and (one := status(int(entry))) is not None:
            yield one


def command(pid: int) -> str:
    """Return the command line of a process, at most 200 characters; empty if it is gone."""
    with suppress(OSError):
        words = (PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return b" ".join(words).decode(errors="replace")[:200]
    return ""


def run_of(pid: int) -> str:
    """Return the run that a process belongs to, ours only; empty if it is of none."""
    return _environment(pid).get("LIBRA_RUN", "")


def marker_of(pid: int) -> tuple[str, str, str] | None:
    """Run, node and process name of a process of any run of this user; None if it is of none."""
    environment = _environment(pid)
    run, node = environment.get("LIBRA_RUN", ""), environment.get("LIBRA_NODE", "")
    return (run, node, environment.get("LIBRA_PROCESS", "")) if run and node else None


def has_token_file(pid: int) -> bool:
    """Whether a process was started by an agent, or by one that was: agent and guard were not."""
    return "LIBRA_TOKEN_FILE" in _environment(pid)


def boot_id() -> str:
    """Name this boot of the machine: pids and start times of another mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def send(identity: ProcessIdentity, signum: signal.Signals) -> None:
    """Signal exactly this process, or none if it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        handle = _handle(identity.pid)
        try:
            # Checked after the handle is taken: from here on the pid cannot change its meaning.
            if identity.alive:
                _kill(identity.pid, handle, signum)
        finally:
            if handle is not None:
                os.close(handle)


def _handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        # Before Linux 5.3; and in containers whose filter of system calls does not know it.
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise


def _kill(pid: int, handle: int | None, signum: signal.Signals) -> None:
    if handle is None:
        os.kill(pid, signum)
    else:
        signal.pidfd_send_signal(handle, signum)


def _environment(pid: int) -> dict[str, str]:
    try:
        block = (PROC / str(pid) / "environ").read_bytes()
    except OSError:  # gone, or another user's: not ours either way
        return {}
    pairs = (entry.partition("=") for entry in block.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name.startswith("LIBRA_")}
