"""How fast a version of random weights reaches hosts with links of their own.

    python -m tests.research.sync --bytes 1e9 --hosts 1 2 3 --rates 0 1 10      Gb/s, 0: as it comes

prints a line for every number of hosts and rate: megabytes a second of the host that was done
first, and of all of them together, by libra and by plain sockets from the host that publishes,
which send the same bytes to every host and look at none of them, and by a process group (gloo) over
the hosts' interface, whose members are processes that run already; and seconds of a core that a GB
takes at the host that publishes, of all that it sent, and at the others, of all that each got, the
kernel's part included. What all hosts have lies in ``--directory``. Hosts are network namespaces;
needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from libra_cli.node.credentials import Credentials
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import ProbeResult, publish
from libra_cli.node.weights.weight_server import FABRIC, GroupSeat, WeightServer
from libra_cli.runtime.credentials.authority import Authority, peer_url
from tests.netns import Network, SshHost, network

TOKEN = "a-token-for-measurements"
STREAMS = 4
BUFFER = 4 * 1024**2
PULL_S = 600.0
TENSOR = (2048, 6144)
"""Of Qwen3-1.7B's largest matrices but the embedding."""


def main() -> None:
    """Measure every number of hosts at every rate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--directory", default="/dev/shm")
    given = parser.parse_args()
    most = max(given.hosts)
    with tempfile.TemporaryDirectory() as scratch, network(1 + most, Path(scratch)) as net:
        for rate in given.rates:
            net.shape(rate)
            for count in given.hosts:
                for _ in range(given.repeat):
                    told = measure(net, count, int(given.bytes), given.directory)
                    sys.stdout.write(json.dumps({"hosts": count, "gbit_s": rate, **told}) + "\n")
                    sys.stdout.flush()


def measure(net: Network, count: int, size: int, directory: str) -> dict[str, float]:
    """Megabytes a second to so many hosts: by libra, and by plain sockets."""
    shared = Path(tempfile.mkdtemp(prefix="libra-sync-", dir=directory))
    try:
        origin, takers = net.hosts[0], net.hosts[1 : 1 + count]
        name, written = _publish(shared / origin.name / "run", size)
        # One certificate for all, of no host in particular.
        told = Credentials.of(TOKEN, Authority.make().issue("any")).as_json()
        with ExitStack() as stack:
            roles = [
                stack.enter_context(_role(host, shared / host.name / "run", told))
                for host in (origin, *takers)
            ]
            urls = [peer_url(role.address, role.port, "any") for role in roles]
            before = roles[0].used()
            ours, used = _timed(
                [
                    (role, {"pull": name, "sources": [*urls[1 : 1 + i], *urls[2 + i :], urls[0]]})
                    for i, role in enumerate(roles[1:])
                ]
            )
            sender_s = roles[0].used() - before
            fabric, fabric_sender_s, fabric_used = _by_fabric(name, roles, urls[0])
            raw, raw_used = _timed(
                [(role, {"raw": [roles[0].address, roles[0].raw]}) for role in roles[1:]]
            )
        return {
            "sender_cpu_s_gb": round(sender_s / written * 1e9, 2),
            "receiver_cpu_s_gb": round(sum(used) / count / written * 1e9, 2),
            "fabric_sender_cpu_s_gb": round(fabric_sender_s / written * 1e9, 2),
            "fabric_receiver_cpu_s_gb": round(sum(fabric_used) / count / written * 1e9, 2),
            "raw_receiver_cpu_s_gb": round(sum(raw_used) / count / written * 1e9, 2),
            "first_mb_s": round(written / min(ours) / 1e6, 1),
            "all_mb_s": round(count * written / max(ours) / 1e6, 1),
            "fabric_first_mb_s": round(written / min(fabric) / 1e6, 1),
            "fabric_all_mb_s": round(count * written / max(fabric) / 1e6, 1),
            "raw_first_mb_s": round(written / min(raw) / 1e6, 1),
            "raw_all_mb_s": round(count * written / max(raw) / 1e6, 1),
        }
    finally:
        shutil.rmtree(shared)


def _by_fabric(
    name: str, roles: Sequence[_Role], url: str
) -> tuple[list[float], float, list[float]]:
    """Seconds of each host, and of a core those of the publisher and of each, by a group."""
    for role in roles[1:]:
        role.ask({"forget": True})
    _joined("first", roles)  # in which torch is imported
    seat = {"group": "second", "addresses": _joined("second", roles)}
    takers = [(role, {"pull": name, "sources": [url], "seat": seat}) for role in roles[1:]]
    seconds, used = _timed([(roles[0], {"send": name, "seat": seat}), *takers])
    return seconds[1:], used[0], used[1:]


def _joined(group: str, roles: Sequence[_Role]) -> list[str]:
    with ThreadPoolExecutor(len(roles)) as pool:
        ranked = enumerate(roles)
        return [*pool.map(lambda one: one[1].join(group, one[0], len(roles)), ranked)]


def _publish(root: Path, size: int) -> tuple[str, int]:
    root.parent.mkdir(parents=True)
    count = max(1, size // (2 * TENSOR[0] * TENSOR[1]))
    bits = torch.randint(-(2**15), 2**15, TENSOR, dtype=torch.int16)
    tensors = ((f"layer.{i}", (bits ^ i).view(torch.bfloat16)) for i in range(count))
    probe = ProbeResult([1, 2], [-1.0])
    sums = {(f"layer.{i}", 0): 0 for i in range(count)}
    done = publish(
        whole(tensors), root, version=0, trainer_incarnation=0, probe=probe, keep=2, sums=sums
    )
    return done.name, done.bytes


class _Role:
    """A process on a host that serves, and pulls when it is told."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self.address = address
        self.port, self.raw = json.loads(self._out.readline())

    def ask(self, what: dict[str, Any]) -> tuple[float, float]:
        """Seconds it took, and those of a core that the process used meanwhile."""
        self._in.write(json.dumps(what) + "\n")
        self._in.flush()
        seconds, used = json.loads(self._out.readline())
        return seconds, used

    def join(self, group: str, rank: int, size: int) -> str:
        """Join a group, and return where this host's rank listens."""
        self._in.write(json.dumps({"join": [group, "eth0", rank, size]}) + "\n")
        self._in.flush()
        return str(json.loads(self._out.readline()))

    def used(self) -> float:
        """Seconds of a core that the process has used until now."""
        return self.ask({"used": True})[1]


@contextmanager
def _role(host: SshHost, root: Path, told: str) -> Iterator[_Role]:
    argv = [
        sys.executable,
        "-c",
        "from tests.research.sync import host; host()",
        str(root),
        host.address,
    ]
    with subprocess.Popen(
        ["ip", "netns", "exec", host.namespace, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(told + "\n")
            process.stdin.flush()
            yield _Role(process, host.address)
        finally:
            process.kill()


def _timed(
    asked: Sequence[tuple[_Role, dict[str, Any]]],
) -> tuple[list[float], list[float]]:
    """Of each, the seconds it took, and those of a core."""
    with ThreadPoolExecutor(len(asked)) as pool:
        told = list(pool.map(lambda one: one[0].ask(one[1]), asked))
    return [seconds for seconds, _ in told], [used for _, used in told]


def host() -> None:
    """Be a host: serve what is in a directory, and do what comes on standard input."""
    server = WeightServer(Path(sys.argv[1]), Credentials(**json.loads(sys.stdin.readline())))
    raw = socket.create_server(("0.0.0.0", 0), backlog=64)
    threading.Thread(target=_send_raw, args=(raw, server.root), daemon=True).start()
    ports = [server.serve(sys.argv[2], 0), raw.getsockname()[1]]
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        what = json.loads(line)
        began, used = time.monotonic(), _used(server)
        told: object = None
        if "join" in what:
            told = server.fabric.join(*what["join"])
        else:
            _obey(server, what)
        seconds = time.monotonic() - began
        before = 0.0 if "used" in what else used
        sys.stdout.write(json.dumps(told or [seconds, _used(server) - before]) + "\n")
        sys.stdout.flush()


def _obey(server: WeightServer, what: dict[str, Any]) -> None:
    seat = GroupSeat(**what["seat"]) if "seat" in what else None
    if "pull" in what:
        pulled = server.pull(what["pull"], what["sources"], PULL_S, seat)
        assert seat is None or pulled.kind == FABRIC, pulled.detail
    elif "send" in what:
        assert seat is not None
        server.send(what["send"], seat, PULL_S)
    elif "forget" in what:
        server.forget([])
    elif "raw" in what:
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(_receive_raw, [tuple(what["raw"])] * STREAMS))


def _used(server: WeightServer) -> float:
    """Seconds of a core that this process and its member of groups have used."""
    member = server.fabric._process
    ticks = 0
    if member is not None:
        ticks = sum(map(int, Path(f"/proc/{member.pid}/stat").read_text().split()[13:15]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _send_raw(listener: socket.socket, root: Path) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send_files, args=(connection, root), daemon=True).start()


def _send_files(connection: socket.socket, root: Path) -> None:
    with connection:
        for path in sorted(root.glob("v*/model-*")):
            with path.open("rb") as file:
                _send_share(connection, file)


def _send_share(connection: socket.socket, file: IO[bytes]) -> None:
    left = os.fstat(file.fileno()).st_size // STREAMS
    while left > 0:
        left -= os.sendfile(connection.fileno(), file.fileno(), 0, min(left, BUFFER))


def _receive_raw(place: tuple[str, int]) -> None:
    buffer = bytearray(BUFFER)
    with socket.create_connection(place) as connection:
        while connection.recv_into(buffer, BUFFER, socket.MSG_WAITALL):
            pass


if __name__ == "__main__":
    main()
