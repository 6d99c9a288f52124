"""Every kind of fault, and what it means that a run has recovered from one.

A run is **well** when every host is ready, every slot serves or trains, and a step has ended since
the fault was over. That is asked of every kind, and more of some:

    kind                       the run has recovered when it is well and ...
    ------------------------   -------------------------------------------------------------------
    X killed, X frozen for     another X runs on that host, and its slot has changed its state since
    good (X starts no thing    (a frozen one is never continued: whoever finds it must end it)
    twice: see Role)
    X frozen for a while       it is well: nobody need have noticed
    cable, sshd, slow link,    it is well: short ones need no notice; ones past the lease end what
    full disk, full memory     runs there, and the host comes back with an agent of its own
    gradient worker killed     it is well: a slot that serves was ordered to compute gradients, its
                               worker was killed and came back, and it was ordered to serve again
    version damaged            it is well
    records damaged            another agent runs on that host
    checkpoint damaged         another controller has taken a step, from the checkpoint before
    reboot                     another agent runs on that host
    controller killed          another one (``libra run --resume``) has taken a step
    controller frozen, hung    the same one has taken a step
    up, without descriptors,
    with files it cannot write
    port taken                 another server runs on that host, while its old port is taken

Seconds are from the injection to the first of two looks, half a second apart, that find it so.
"""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.processes import Role, send
from tests.cluster.recipe import LEASE_S
from tests.netns import SshHost

WELL = frozenset({"serving", "training"})
SHORT_S = 3.0
PAST_LEASE_S = LEASE_S + 6.0
RECOVER_S = 150.0
MOVE_S = 90.0
STOP_S = 90.0
SHM = "/dev/shm"


@dataclass(slots=True)
class Injection:
    """One fault at one place."""

    kind: Kind
    cluster: Cluster
    host: SshHost | None
    """None: the controller."""
    at: float = field(default_factory=time.time)
    over: float = 0.0
    """When it was undone; 0: not yet."""
    before: frozenset[int] = frozenset()
    """Pids of the role there, when it began."""
    seconds: float | None = None
    """Until the run had recovered."""
    alone: bool = True
    """Whether no other fault came with it, for which a recovery waits too."""
    outcome: str = ""
    """Why it has not, if it has not."""

    @property
    def place(self) -> SshHost:
        """The host, of a fault that has one."""
        assert self.host is not None
        return self.host

    def begin(self) -> None:
        """Break it."""
        if self.kind.role is not None and self.host is not None:
            self.before = self._pids()
        self.at = time.time()
        self.kind.begin(self)

    def end(self) -> None:
        """Undo what does not undo itself."""
        self.kind.end(self)
        self.over = time.time()

    def recovered(self) -> bool:
        """Whether the run has recovered from it, by what can be seen now."""
        try:
            return is_well(self.cluster, self.over) and self._replaced()
        except sqlite3.Error:
            return False

    def _pids(self) -> frozenset[int]:
        assert self.kind.role is not None
        return frozenset(one.pid for one in self.cluster.processes(self.kind.role, self.host))

    def _replaced(self) -> bool:
        if self.kind.role is None or not self.kind.replaced:
            return True
        now = self._pids()
        if not now or now & self.before:
            return False
        if self.kind.role not in (Role.SERVER, Role.TRAINER):
            return True
        changed = f"node = '{self.place.address}' AND since > {self.at}"
        return bool(_query(self.cluster, f"SELECT 1 FROM slots WHERE {changed}"))


Act = Callable[[Injection], None]


def _nothing(_: Injection) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    name: str
    where: str
    """``serve | hybrid | train | any | controller``"""
    begin: Act
    end: Act = _nothing
    lasts_s: float = 0.0
    """From ``begin`` to ``end``."""
    role: Role | None = None
    replaced: bool = False
    """Another process of ``role`` must be there afterwards."""
    after: Act = _nothing
    """What is undone once the run has recovered, or has not in time."""
    every: int = 1
    """It comes once in this many rounds: those that take long are rarer."""
    deadline_s: float = RECOVER_S


def is_well(c: Cluster, since: float) -> bool:
    """Whether everything works and a step has ended since then."""
    if not since or c.controller is None or c.controller.ended:
        return False
    slots = _query(c, "SELECT state FROM slots")
    nodes = _query(c, "SELECT state FROM nodes")
    stepped = _query(c, f"SELECT 1 FROM steps WHERE ended_at > {since} LIMIT 1")
    return (
        {state for (state,) in slots} <= WELL
        and {state for (state,) in nodes} == {"ready"}
        and bool(stepped)
    )


def _query(c: Cluster, sql: str) -> list[tuple[object, ...]]:
    assert c.controller is not None
    return c.controller.query(sql)


# -- processes of hosts ----------------------------------------------------------------------------


def _killed(what: Injection, number: signal.Signals = signal.SIGKILL) -> None:
    assert what.kind.role is not None
    what.cluster.kill(what.kind.role, number, host=what.host)


def _continued(what: Injection) -> None:
    """Only those that were stopped: a successor has not been."""
    assert what.kind.role is not None
    there = what.cluster.processes(what.kind.role, what.host)
    send([one for one in there if one.pid in what.before], signal.SIGCONT)


_frozen = partial(_killed, number=signal.SIGSTOP)


def _port_taken(what: Injection) -> None:
    """Its server is killed, and somebody else has its port before it is back."""
    for port in _listening(what.cluster, what.place)[:1]:
        what.cluster.squat(what.place, port, at_once=False)
    _killed(what)


def _port_free(what: Injection) -> None:
    what.cluster.release(what.place)


def _listening(c: Cluster, host: SshHost) -> list[int]:
    """Ports from 21000 on that something listens on, on its loopback."""
    init = c.net.machine(host).init
    rows = Path(f"/proc/{init}/net/tcp").read_text().splitlines()[1:]
    words = (row.split() for row in rows)
    ports = [int(word[1].rpartition(":")[2], 16) for word in words if word[3] == "0A"]
    return sorted(port for port in ports if 21000 <= port <= 21999)


# -- a slot that changes sides ---------------------------------------------------------------------


def _order(what: Injection, *, gradient: int) -> None:
    """Have the hybrid slot compute gradients, or serve again, and wait until it does."""
    run = what.cluster.controller
    assert run is not None
    ((before,),) = run.query("SELECT count(*) FROM moves")
    split = f"rollout={len(what.cluster.hosts) - 1 - gradient},gradient={gradient},train=1"
    done = run.libra("rebalance", str(run.run_dir), "--to", split, timeout_s=MOVE_S)
    if done.returncode:
        raise RuntimeError(f"{split} was refused: {done.stdout}{done.stderr}")
    over = f"SELECT state, detail FROM moves WHERE move > {before} AND ended_at IS NOT NULL"
    (state, detail), *_ = run.wait("end of a move", lambda: run.query(over), timeout_s=MOVE_S)
    if state != "done":
        raise RuntimeError(f"the move to {split} failed: {detail}")


def _worker_killed(what: Injection) -> None:
    _order(what, gradient=1)
    what.at = time.time()
    what.before = frozenset(one.pid for one in what.cluster.kill(Role.GRADIENT, host=what.host))


def _worker_back(what: Injection) -> None:
    run = what.cluster.controller
    assert run is not None
    works = f"node = '{what.place.address}' AND since > {what.at} AND state = 'training'"
    again = f"SELECT 1 FROM slots WHERE {works}"
    run.wait("another gradient worker", lambda: run.query(again), timeout_s=MOVE_S)
    _order(what, gradient=0)


# -- files -----------------------------------------------------------------------------------------


def _damage(directory: Path, pattern: str) -> None:
    """Turn every bit of a few bytes in the middle of the newest file of that pattern."""
    found = [path for path in directory.glob(pattern) if path.is_file()]
    if not found:
        raise FileNotFoundError(f"{directory}: no {pattern}")
    newest = max(found, key=lambda path: path.stat().st_mtime)
    with newest.open("r+b") as file:
        middle = newest.stat().st_size // 2
        file.seek(middle)
        damaged = bytes(255 - byte for byte in file.read(16))
        file.seek(middle)
        file.write(damaged)


def _checkpoint_damaged(what: Injection) -> None:
    """Of a run that was stopped, the newest one: who resumes goes on from the one before."""
    trains = what.cluster.hosts[-1]
    disk = what.cluster.net.machine(trains).path(trains.disk)
    assert what.cluster.controller is not None
    what.cluster.controller.stop(STOP_S)
    _damage(disk, "runs/*/*/checkpoints/*/*.distcp")


def _version_damaged(what: Injection) -> None:
    _damage(what.cluster.net.machine(what.place).path(SHM), "libra-*/*/*/*.safetensors")


def _records_damaged(what: Injection) -> None:
    """What the agent has written down of the processes it started is cut in two."""
    disk = what.cluster.net.machine(what.place).path(what.place.disk)
    for path in disk.glob("runs/*/*/processes.json"):
        os.truncate(path, path.stat().st_size // 2)
    _killed(what)


# -- hosts -----------------------------------------------------------------------------------------


def _cut(what: Injection) -> None:
    what.cluster.cut(what.place)


def _healed(what: Injection) -> None:
    what.cluster.heal(what.place)


def _slow(what: Injection) -> None:
    what.cluster.slow(what.place, 1.0, delay_ms=100.0, loss=0.01)


def _quick(what: Injection) -> None:
    what.cluster.slow(what.place, 0.0)


def _sshd_gone(what: Injection) -> None:
    what.cluster.refuse_sshd(what.place)


def _sshd_back(what: Injection) -> None:
    what.cluster.restart_sshd(what.place)


def _full(what: Injection, path: str | None = None) -> None:
    what.cluster.fill(what.place, path)


def _empty(what: Injection, path: str | None = None) -> None:
    what.cluster.empty(what.place, path)


def _rebooted(what: Injection, off_s: float = 0.0) -> None:
    what.cluster.reboot(what.place, off_s=off_s)


# -- the controller --------------------------------------------------------------------------------


def _controller(what: Injection, number: signal.Signals = signal.SIGKILL) -> None:
    assert what.cluster.controller is not None
    what.cluster.controller.kill(number)


def _resumed(what: Injection) -> None:
    assert what.cluster.controller is not None
    what.cluster.controller.resume()


def _limited(what: Injection, limit: int, soft: int) -> None:
    """Lower or lift a soft limit of the controller; -1 lifts it."""
    assert what.cluster.controller is not None
    pid = what.cluster.controller.process.pid
    _, hard = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (hard if soft < 0 else soft, hard))


def _agents_too(what: Injection) -> None:
    what.cluster.kill(Role.AGENT)
    what.cluster.kill(Role.GUARD)
    _controller(what)


def _limit(limit: int, soft: int) -> tuple[Act, Act]:
    return partial(_limited, limit=limit, soft=soft), partial(_limited, limit=limit, soft=-1)


def _of_processes() -> Iterator[Kind]:
    killed = {
        Role.SERVER: "serve",
        Role.TRAINER: "train",
        Role.LAUNCHER: "train",
        Role.AGENT: "any",
        Role.GUARD: "any",
        Role.BRIDGE: "any",
    }
    for role, where in killed.items():
        yield Kind(f"{role} killed", where, _killed, role=role, replaced=True)
    for role in (Role.SERVER, Role.TRAINER, Role.AGENT):
        name = f"{role} frozen for {SHORT_S:.0f} s"
        yield Kind(name, killed[role], _frozen, _continued, SHORT_S, role)
    for role in (Role.SERVER, Role.TRAINER):
        name = f"{role} frozen for good"
        yield Kind(name, killed[role], _frozen, role=role, replaced=True, every=6, deadline_s=240)
    name = "agent frozen past the lease"
    yield Kind(name, "any", _frozen, _continued, PAST_LEASE_S, Role.AGENT, every=6)
    name = "gradient worker killed between two moves"
    yield Kind(name, "hybrid", _worker_killed, _worker_back, every=3)
    name = "port taken"
    yield Kind(name, "serve", _port_taken, after=_port_free, role=Role.SERVER, replaced=True)


def _of_files() -> Iterator[Kind]:
    name = "stopped, checkpoint damaged, resumed"
    yield Kind(name, "controller", _checkpoint_damaged, _resumed, every=3)
    yield Kind("version damaged", "any", _version_damaged)
    name = "records damaged, agent killed"
    yield Kind(name, "any", _records_damaged, role=Role.AGENT, replaced=True)


def _of_hosts() -> Iterator[Kind]:
    memory = partial(_full, path=SHM), partial(_empty, path=SHM)
    yield Kind("cable cut for 3 s", "any", _cut, _healed, SHORT_S)
    yield Kind("cable cut past the lease", "any", _cut, _healed, PAST_LEASE_S, every=6)
    yield Kind("1 Mb/s for 6 s", "any", _slow, _quick, 6.0)
    yield Kind("sshd restarted", "any", _sshd_back)
    yield Kind("sshd refuses for 4 s", "any", _sshd_gone, _sshd_back, 4.0)
    yield Kind("disk full for 5 s", "any", _full, _empty, 5.0)
    yield Kind("memory full for 5 s", "any", *memory, 5.0)
    off = partial(_rebooted, off_s=PAST_LEASE_S)
    yield Kind("reboot", "any", _rebooted, role=Role.AGENT, replaced=True, every=2)
    yield Kind("reboot past the lease", "any", off, role=Role.AGENT, replaced=True, every=6)


def _of_controllers() -> Iterator[Kind]:
    stop = partial(_controller, number=signal.SIGSTOP)
    go_on = partial(_controller, number=signal.SIGCONT)
    hang_up = partial(_controller, number=signal.SIGHUP)
    files, descriptors = _limit(resource.RLIMIT_FSIZE, 1), _limit(resource.RLIMIT_NOFILE, 8)
    for name, begin, end, lasts_s, every in (
        ("killed", _controller, _resumed, 1.0, 1),
        ("killed past the lease", _controller, _resumed, PAST_LEASE_S, 6),
        ("and agents killed", _agents_too, _resumed, 1.0, 2),
        ("frozen for 3 s", stop, go_on, SHORT_S, 1),
        ("frozen past the lease", stop, go_on, PAST_LEASE_S, 6),
        ("hung up", hang_up, _nothing, 0.0, 1),
        ("cannot write for 5 s", *files, 5.0, 1),
        ("without descriptors for 3 s", *descriptors, 3.0, 1),
    ):
        yield Kind(f"controller {name}", "controller", begin, end, lasts_s, every=every)


KINDS: Mapping[str, Kind] = {
    kind.name: kind for kind in (*_of_processes(), *_of_files(), *_of_hosts(), *_of_controllers())
}
