"""Several real SSH hosts on one machine: network namespaces, each with its own sshd.

Every host has its own address, loopback, ports, host key, pid namespace, ``/dev/shm`` and boot id,
and they share the file system, but for a small disk of its own that each can be given. Whatever
runs on a host dies with it, and the hosts die with the test run, even with one that is killed.
Needs root; elsewhere ``missing()`` says what for.

    with network(2, tmp_path) as net:
        transport = SshTransport(net.hosts[0].address, config=net.config)
        net.cut(net.hosts[0])
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

BLOCKS = 16
"""Networks that can exist at a time, each a /28 of 10.77.0.0/24."""
HOSTS = 12
START_S = 10.0
SSHD = "/usr/sbin/sshd"
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", SSHD)
MORTAL = ("setpriv", "--pdeathsig", "KILL")
"""Dies with this process, however this one dies. Holds for the thread that starts it."""
INIT = """
import os, time
print("up", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""
"""Process 1 of a host: reaps the orphans."""
SHM_MB = 512
"""Of a host's ``/dev/shm``, which otherwise could take half of the memory."""

SSHD_CONFIG = """\
HostKey {directory}/host_key
AuthorizedKeysFile {home}/.ssh/id_ed25519.pub
PidFile none
UsePAM no
UseDNS no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
"""

SSH_CONFIG = """\
Host 10.77.0.*
  IdentityFile {home}/.ssh/id_ed25519
  UserKnownHostsFile {home}/.ssh/known_hosts
"""


@dataclass(frozen=True, slots=True)
class SshHost:
    """One host of a network."""

    name: str
    address: str
    port: int
    namespace: str
    link: str
    """Our end of its cable."""
    disk: str
    """Where its own disk is mounted; an ordinary directory where it has none."""


class Network:
    """Hosts on one bridge, and what a client needs to reach them."""

    def __init__(self, home: Path, machines: list[Machine]) -> None:
        self.home = home
        """A home directory whose ``.ssh`` is set up for the hosts."""
        self.identity = str(home / ".ssh/id_ed25519")
        self.known_hosts = str(home / ".ssh/known_hosts")
        self.config = str(home / ".ssh/config")
        self._machines = machines

    @property
    def hosts(self) -> list[SshHost]:
        """Every host, in order."""
        return [machine.host for machine in self._machines]

    def machine(self, host: SshHost) -> Machine:
        """What runs a host."""
        return next(machine for machine in self._machines if machine.host == host)

    def cut(self, host: SshHost) -> None:
        """Pull the cable."""
        _run("ip", "link", "set", host.link, "down")

    def heal(self, host: SshHost) -> None:
        """Plug it in again."""
        _run("ip", "link", "set", host.link, "up")

    def shape(self, gbit_s: float) -> None:
        """Give every cable this rate in either direction; 0: whatever it takes."""
        burst = max(256 * 1024, int(gbit_s * 1e9 / 8 * 0.001))
        queue = int(gbit_s * 1e9 / 8 * 0.02)
        rate = ["rate", f"{gbit_s}gbit", "burst", str(burst), "limit", str(queue)]
        for host in self.hosts:
            for end in (["-n", host.namespace], "eth0"), ([], host.link):
                command = ["tc", *end[0], "qdisc"]
                _run(*command, "del", "dev", end[1], "root", check=False)
                if gbit_s:
                    _run(*command, "add", "dev", end[1], "root", "tbf", *rate)

    def slow(
        self, host: SshHost, mbit_s: float, *, delay_ms: float = 0.0, loss: float = 0.0
    ) -> None:
        """Give one cable this rate, delay and share of lost packets in either direction; rate 0:
        whatever it takes again. A kernel without netem gives the rate alone."""
        for end in (["-n", host.namespace], "eth0"), ([], host.link):
            command = ["tc", *end[0], "qdisc"]
            _run(*command, "del", "dev", end[1], "root", check=False)
            if mbit_s:
                rate = ("rate", f"{mbit_s}mbit")
                told = (*rate, "delay", f"{delay_ms}ms", "loss", f"{100 * loss}%")
                place = (*command, "add", "dev", end[1], "root")
                if has_netem():
                    _run(*place, "netem", *told, "limit", "1000")
                else:
                    _run(*place, "tbf", *rate, "burst", "32kb", "limit", "200kb")

    def files(self, host: SshHost, directory: str) -> list[str]:
        """Everything under a directory of a host, which may be one that only the host sees."""
        find = f"test ! -e {directory} || find {directory} -mindepth 1"
        return _run("ssh", "-F", self.config, host.address, find).split()


def missing() -> str:
    """Why there can be no such network here; empty if there can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"hosts in network namespaces need {', '.join(absent)}" if absent else ""


class Machine:
    """One host's processes: a process 1, whose death is that of all of them, and an sshd."""

    def __init__(self, host: SshHost, directory: Path, home: Path, disks: int) -> None:
        self.host = host
        self._directory = directory
        self._disks = disks
        """A process in whose mounts the hosts' disks are."""
        self._boot_id = directory / "boot_id"
        self._config = directory / "sshd_config"
        self._config.write_text(SSHD_CONFIG.format(directory=directory, home=home))
        self._unshare: subprocess.Popen[str] | None = None
        self._sshd: subprocess.Popen[str] | None = None
        self.init = 0
        """Pid here of its process 1."""

    def boot(self) -> None:
        """Start process 1 with empty memory and a boot id that no boot had before."""
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        mounts = f"mount -t tmpfs -o size={SHM_MB}m tmpfs /dev/shm && "
        mounts += f"mount --bind {self._boot_id} /proc/sys/kernel/random/boot_id && "
        self._unshare = subprocess.Popen(
            [
                *MORTAL,
                *("nsenter", "--target", str(self._disks), "--mount"),
                *("ip", "netns", "exec", self.host.namespace),
                *(*isolate, "sh", "-c", f"{mounts} exec {sys.executable} -S -c '{INIT}'"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "up\n":
            raise RuntimeError(f"{self.host.name} does not boot")
        self._unshare.stdout.close()
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self.init = int(children.read_text())

    def start_sshd(self) -> None:
        """Have an sshd again; return before it listens."""
        inside = ("nsenter", "--target", str(self.init), "--mount", "--pid", "--net")
        with open(self._directory / "sshd.log", "a") as log:
            self._sshd = subprocess.Popen(
                [*MORTAL, *inside, SSHD, "-D", "-e", "-f", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )

    def stop_sshd(self) -> None:
        """End the sshd and every connection of its; what they have started goes on."""
        for pid in self.pids():
            if command_of(pid).startswith("sshd"):
                _kill(pid)
        if self._sshd is not None:
            self._sshd.wait(START_S)
            self._sshd = None

    def halt(self) -> None:
        """End everything that runs on it."""
        if self._unshare is None:
            return
        left = self.pids()
        self._unshare.kill()
        self._unshare.wait(START_S)
        self._unshare = None
        if self._sshd is not None:
            self._sshd.wait(START_S)
            self._sshd = None
        give_up = time.monotonic() + START_S
        while any(Path(f"/proc/{pid}").exists() for pid in left):
            if time.monotonic() > give_up:
                raise TimeoutError(f"{self.host.name} does not come down: {left}")
            time.sleep(0.01)

    def pids(self) -> list[int]:
        """What runs on it, by the pids here, oldest first."""
        namespace = os.stat(f"/proc/{self.init}/ns/pid").st_ino
        return [pid for pid in _pids() if _pid_namespace(pid) == namespace]

    def path(self, path: str) -> Path:
        """A path of the host, as it can be opened from here."""
        return Path(f"/proc/{self.init}/root{path}")


@cache
def has_netem() -> bool:
    """Whether this kernel can delay and lose packets."""
    name = uuid.uuid4().hex[:8]
    _run("ip", "link", "add", f"n{name}", "type", "veth", "peer", f"m{name}")
    add = ("tc", "qdisc", "add", "dev", f"n{name}", "root", "netem", "delay", "1ms")
    able = subprocess.run(add, capture_output=True).returncode == 0
    _run("ip", "link", "del", f"n{name}")
    return able


@contextmanager
def network(count: int, directory: Path, *, disk_mb: int = 0) -> Iterator[Network]:
    """A network of so many hosts, each with a disk of so many MB, or none; nothing of it is left
    afterwards."""
    assert count <= HOSTS, f"a network has room for {HOSTS} hosts"
    with ExitStack() as stack:
        block = stack.enter_context(_block())
        bridge, base = f"libra{block}", block * 16
        _remove(block)  # what a killed run has left
        stack.callback(_remove, block)
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"10.77.0.{base + 1}/28", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        hosts = [
            SshHost(
                name=f"host-{index + 1}",
                address=f"10.77.0.{base + 2 + index}",
                port=22,
                namespace=f"{bridge}-{index}",
                link=f"{bridge}v{index}",
                disk=str(directory / f"host-{index + 1}" / "disk"),
            )
            for index in range(count)
        ]
        for host in hosts:
            _plug_in(host, bridge)
            Path(host.disk).mkdir(parents=True)
        disks = stack.enter_context(_disks(hosts, disk_mb))
        home = _make_home(directory)
        machines = [_machine(host, directory / host.name, home, disks) for host in hosts]
        for machine in machines:
            stack.callback(machine.halt)
            machine.boot()
            machine.start_sshd()
        for host in hosts:
            await_sshd(host)
        yield Network(home, machines)


@contextmanager
def _disks(hosts: Sequence[SshHost], disk_mb: int) -> Iterator[int]:
    """A process in whose mounts every host's disk is, and which they die with; its pid."""
    mount = f"mount -t tmpfs -o mode=755,size={disk_mb}m tmpfs "
    mounts = "".join(f"{mount} {host.disk} && " for host in hosts if disk_mb)
    with subprocess.Popen(
        [*MORTAL, "unshare", "--mount", "sh", "-c", f"{mounts} echo up && exec sleep infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "up\n":
                raise RuntimeError("disks of hosts cannot be mounted")
            yield process.pid
        finally:
            process.kill()


@contextmanager
def _block() -> Iterator[int]:
    """A part of the address range that no other test run on this machine uses."""
    for block in range(BLOCKS):
        with open(Path(tempfile.gettempdir()) / f"libra-netns-{block}.lock", "w") as lock:
            if _is_ours(lock):
                yield block
                return
    raise RuntimeError("every block of 10.77.0.0/24 is in use")


def _is_ours(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_home(directory: Path) -> Path:
    home = directory / "home"
    (home / ".ssh").mkdir(mode=0o700, parents=True)
    _make_key(home / ".ssh/id_ed25519")
    (home / ".ssh/config").write_text(SSH_CONFIG.format(home=home))
    (home / ".ssh/known_hosts").touch()
    return home


def _make_key(path: Path) -> str:
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "libra-test", "-f", str(path))
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


def _plug_in(host: SshHost, bridge: str) -> None:
    inside = ("ip", "-n", host.namespace)
    _run("ip", "netns", "add", host.namespace)
    _run("ip", "link", "add", host.link, "type", "veth", "peer", "eth0", "netns", host.namespace)
    _run("ip", "link", "set", host.link, "master", bridge, "up")
    _run(*inside, "addr", "add", f"{host.address}/28", "dev", "eth0")
    _run(*inside, "link", "set", "eth0", "up")
    _run(*inside, "link", "set", "lo", "up")


def _machine(host: SshHost, directory: Path, home: Path, disks: int) -> Machine:
    key = _make_key(directory / "host_key")
    with open(home / ".ssh/known_hosts", "a") as known_hosts:
        known_hosts.write(f"{host.address} {key}\n")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    return Machine(host, directory, home, disks)


def await_sshd(host: SshHost) -> None:
    """Return when its sshd answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host.address, host.port), timeout=1.0) as line:
                if line.recv(4) == b"SSH-":
                    return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"the sshd of {host.name} did not start")


def _remove(block: int) -> None:
    for index in range(HOSTS):
        # A connection that was cut keeps its namespace alive for minutes, and with it the cable.
        _run("ip", "link", "del", f"libra{block}v{index}", check=False)
        _run("ip", "netns", "del", f"libra{block}-{index}", check=False)
    _run("ip", "link", "del", f"libra{block}", check=False)


def _run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=START_S)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def _pids() -> list[int]:
    return sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _pid_namespace(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def command_of(pid: int) -> str:
    """The name of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def marked(run_id: str) -> Sequence[int]:
    """The pids on this machine, its hosts included, that carry the marker of a run."""
    found = []
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"LIBRA_RUN={run_id}".encode() in environment:
            found.append(pid)
    return found
