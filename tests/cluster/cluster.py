"""Hosts to break: runs on them, one after the other, and everything that can happen to machines.

    with cluster(hosts=3) as c:
        run = c.run(recipe)                     # c.nodes(...) writes its nodes
        run.wait_step(2, timeout_s=120)
        c.kill(Role.SERVER)                     # SIGKILL, wherever one is
        c.freeze(Role.TRAINER, 5.0)             # SIGSTOP, and SIGCONT after so many seconds
        c.cut(c.hosts[0]); c.heal(c.hosts[0])   # its cable
        c.fill(c.hosts[0]); c.empty(c.hosts[0])  # its disk
        c.reboot(c.hosts[0])

The hosts are those of ``tests.netns``. Each has a small disk of its own for what libra keeps on it,
and the controller has one too. Nothing is left afterwards, even of a test run that is killed, but
for empty bridges, which the next one removes.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from tests.cluster.controller import Controller
from tests.cluster.processes import Role, RunProcess, processes_of, send
from tests.live import LIBRA
from tests.netns import MORTAL, START_S, Network, SshHost, await_sshd, network

FILLER = "filler"
"""The file that fills a disk."""
CHUNK = 1 << 20
SQUATTER = """
import socket, sys, time
line = socket.socket()
line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
while True:
    try:
        line.bind(("127.0.0.1", int(sys.argv[1])))
        break
    except OSError:
        time.sleep(0.001)
line.listen()
print("up", flush=True)
time.sleep(1e6)
"""


class Cluster:
    """Some hosts, one run at a time on them, and verbs that break things."""

    def __init__(self, net: Network, directory: Path, stack: ExitStack) -> None:
        self.net = net
        self.directory = directory
        self.controller: Controller | None = None
        """Of the newest run."""
        self._runs = 0
        self._stack = stack
        self._squatters: dict[SshHost, subprocess.Popen[str]] = {}
        self._timers: list[threading.Timer] = []
        stack.callback(self._thaw)

    @property
    def hosts(self) -> Sequence[SshHost]:
        """Every host, in order."""
        return self.net.hosts

    def nodes(self, *pools: str | list[str], **more: Any) -> list[dict[str, Any]]:
        """The recipe's nodes: these hosts, with a pool each, and keys that all have."""
        return [
            {
                "host": host.address,
                "identity": self.net.identity,
                "python": sys.executable,
                "workdir": host.disk,
                # Hosts that share their cores: threads that wait for each other spin.
                "env": {"OMP_NUM_THREADS": "1"},
                "pool": pool,
                "slots": 1 if isinstance(pool, str) else len(pool),
                **more,
            }
            for host, pool in zip(self.hosts, pools, strict=True)
        ]

    def run(
        self, recipe: dict[str, Any], *arguments: str, command: Sequence[str] = LIBRA
    ) -> Controller:
        """Start ``libra run`` with the recipe; it ends with the cluster, if not before."""
        self._runs += 1
        controller = Controller(
            self.directory / f"run-{self._runs}", self.net.home, recipe, command
        )
        self.controller = controller
        self._stack.callback(controller.end)
        controller.start(*arguments)
        return controller

    # -- processes -----------------------------------------------------------------------------

    def processes(self, role: Role | None = None, host: SshHost | None = None) -> list[RunProcess]:
        """The run's processes on a host or on all of them, of a role or of all, oldest first."""
        if self.controller is None:
            return []
        run_id, found = self.controller.run_id, []
        for place in self.hosts if host is None else [host]:
            found += processes_of(run_id, self.net.machine(place).pids())
        return [one for one in found if role in (None, one.role)]

    def host_of(self, process: RunProcess) -> SshHost:
        """Where a process runs."""
        return next(h for h in self.hosts if process.pid in self.net.machine(h).pids())

    def kill(
        self,
        role: Role,
        number: signal.Signals = signal.SIGKILL,
        *,
        host: SshHost | None = None,
    ) -> list[RunProcess]:
        """Signal every process of a role, on a host or on all of them; those that were there."""
        found = self.processes(role, host)
        send(found, number)
        return found

    def freeze(
        self, role: Role, seconds: float, *, host: SshHost | None = None
    ) -> list[RunProcess]:
        """Stop every process of a role for so long; return at once."""
        found = self.kill(role, signal.SIGSTOP, host=host)
        timer = threading.Timer(seconds, send, (found, signal.SIGCONT))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
        return found

    def _thaw(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self.kill_all(signal.SIGCONT)

    def kill_all(self, number: signal.Signals) -> None:
        """A signal to everything of the run on every host."""
        send(self.processes(), number)

    # -- the network ---------------------------------------------------------------------------

    def cut(self, host: SshHost) -> None:
        """Pull its cable."""
        self.net.cut(host)

    def heal(self, host: SshHost) -> None:
        """Plug it in again."""
        self.net.heal(host)

    def slow(
        self, host: SshHost, mbit_s: float, *, delay_ms: float = 0.0, loss: float = 0.0
    ) -> None:
        """Give its cable this rate, delay and share of lost packets; rate 0: none of it again."""
        self.net.slow(host, mbit_s, delay_ms=delay_ms, loss=loss)

    def refuse_sshd(self, host: SshHost) -> None:
        """End its sshd with all connections; nobody gets in until ``restart_sshd``."""
        self.net.machine(host).stop_sshd()

    def restart_sshd(self, host: SshHost) -> None:
        """End its sshd with all connections, and have a new one."""
        machine = self.net.machine(host)
        machine.stop_sshd()
        machine.start_sshd()
        await_sshd(host)

    def squat(self, host: SshHost, port: int, *, at_once: bool = True) -> None:
        """Listen on a port of its loopback, as another user's process might; one at a time. If not
        at once, as soon as it is free."""
        self.release(host)
        inside = ("ip", "netns", "exec", host.namespace)
        squatter = subprocess.Popen(
            [*MORTAL, *inside, sys.executable, "-S", "-c", SQUATTER, str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._squatters[host] = squatter
        self._stack.callback(self.release, host)
        assert squatter.stdout is not None
        with DefaultSelector() as selector:  # select() takes no descriptor above 1,023
            selector.register(squatter.stdout, EVENT_READ)
            listens = at_once and bool(selector.select(START_S))
        if at_once and not listens:
            raise RuntimeError(f"{host.name}: somebody else has port {port}")

    def release(self, host: SshHost) -> None:
        """Give the port free again."""
        squatter = self._squatters.pop(host, None)
        if squatter is not None:
            squatter.kill()
            squatter.communicate()

    # -- disks and power -----------------------------------------------------------------------

    def fill(self, host: SshHost, path: str | None = None) -> None:
        """Leave no byte on its disk, or on whatever is mounted at a path."""
        where = self._filler(host, path)
        with where.open("wb", buffering=0) as file:
            size = CHUNK
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def empty(self, host: SshHost, path: str | None = None) -> None:
        """Take away what ``fill`` has put there."""
        self._filler(host, path).unlink(missing_ok=True)

    def _filler(self, host: SshHost, path: str | None) -> Path:
        return self.net.machine(host).path(path or host.disk) / FILLER

    def reboot(self, host: SshHost, *, off_s: float = 0.0) -> None:
        """Power off and, after so many seconds, on again: memory is empty, the disk is not."""
        machine = self.net.machine(host)
        machine.halt()
        if off_s:
            threading.Event().wait(off_s)
        machine.boot()
        machine.start_sshd()
        await_sshd(host)

    def left(self) -> list[str]:
        """What the run has left on the hosts: processes, and files in their memory."""
        found = [f"{self.host_of(one).name}: {one}" for one in self.processes()]
        for host in self.hosts:
            memory = self.net.machine(host).path("/dev/shm")
            found += [f"{host.name}: {path}" for path in _files(memory)]
        return found


def _files(directory: Path) -> list[str]:
    found: list[str] = []
    with suppress(FileNotFoundError):
        for place, _, names in os.walk(directory):
            found += [os.path.join(place, name) for name in names]
    return found


@contextmanager
def cluster(
    hosts: int = 3, directory: Path | None = None, *, disk_mb: int = 128
) -> Iterator[Cluster]:
    """So many hosts, each with a disk of so many MB; ``directory`` keeps logs and the run."""
    with ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cluster-")))
        net = stack.enter_context(network(hosts, directory / "net", disk_mb=disk_mb))
        yield Cluster(net, directory, stack)
