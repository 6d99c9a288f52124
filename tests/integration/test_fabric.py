"""Versions over a real gloo group of three member processes, and ranks that are lost on the way."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.weights.chunks import CHUNK_BYTES, listed
from libra_cli.node.weights.weight_server import FABRIC, GroupSeat, PullResult, WeightServer
from tests.credentials import credentials_of, url_of

pytestmark = pytest.mark.integration

SHORT, LONG = 3 * CHUNK_BYTES + 1001, 100 * CHUNK_BYTES
"""Bytes of a version that is there at once, and of one during which something can happen."""
FILE = "model-00000.safetensors"
WITHIN_S = 60.0
Transfer = tuple["Future[None]", "list[Future[PullResult]]"]


class Hosts:
    """A host that publishes and two that take, with a member process each."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.servers = [WeightServer(root / f"host{n}/run", credentials_of()) for n in range(3)]
        self.publisher, *self.takers = self.servers
        self.url = url_of(self.publisher.serve("127.0.0.1", 0))
        self._threads = ThreadPoolExecutor(8)
        self._sent: list[Future[None]] = []
        self._versions = 0

    def publish(self, size: int) -> str:
        """Write a version with one file, and return its name."""
        self._versions += 1
        name = f"v{self._versions:06d}-e0"
        version = self.publisher.root / name
        version.mkdir()
        (version / FILE).write_bytes(os.urandom(size))
        files = {FILE: {"bytes": size, "sha256": listed(version / FILE, "sha256").digests}}
        (version / "manifest.json").write_text(json.dumps({"name": name, "files": files}))
        return name

    def seat(self) -> GroupSeat:
        """Return the seat in a group that all of them have joined."""
        group = secrets.token_hex(4)
        joined = self._threads.map(
            lambda rank: self.servers[rank].fabric.join(group, "lo", rank, 3), range(3)
        )
        return GroupSeat(group, [*joined])

    def transfer(self, name: str, url: str = "") -> Transfer:
        """Begin to send a version by a new group, and to take it, once the one before is sent or
        given up."""
        wait(self._sent, WITHIN_S)
        seat = self.seat()
        sent = self._threads.submit(self.publisher.send, name, seat, WITHIN_S)
        self._sent = [sent]
        sources = [url or self.url]
        return sent, [
            self._threads.submit(taker.pull, name, sources, WITHIN_S, seat) for taker in self.takers
        ]

    def until_begun(self, taker: int, name: str) -> None:
        """Wait until a chunk has come to that host."""
        while name not in (drafts := self.takers[taker]._drafts) or not drafts[name].is_begun:
            time.sleep(0.001)

    def signal(self, taker: int, number: int) -> None:
        """Send a signal to the member of that host."""
        process = self.takers[taker].fabric._process
        assert process is not None
        os.kill(process.pid, number)

    def have(self, name: str) -> bool:
        """Whether all takers have the version as it was published."""
        data = (self.publisher.root / name / FILE).read_bytes()
        return all((one.root / name / FILE).read_bytes() == data for one in self.takers)

    def copy_of(self, name: str) -> WeightServer:
        """Return another server that has the version."""
        other = WeightServer(self._root / "other/run", credentials_of())
        shutil.copytree(self.publisher.root / name, other.root / name)
        return other


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    yield made
    processes = [one.fabric._process for one in made.servers]
    for one in made.servers:
        one.close()
    assert all(one is None or one.poll() is not None for one in processes)


def test_a_version_comes_whole_by_the_group(hosts: Hosts):
    for size in (SHORT, LONG, SHORT):
        name = hosts.publish(size)
        sent, pulls = hosts.transfer(name)
        assert [one.result().kind for one in pulls] == [FABRIC, FABRIC]
        assert [one.result().sent_by for one in pulls] == [{hosts.url: 0, FABRIC: size}] * 2
        assert sent.result() is None
        assert hosts.have(name)


def test_what_is_damaged_on_the_way_is_pulled(hosts: Hosts):
    name = hosts.publish(SHORT)
    good = hosts.copy_of(name)
    try:
        with (hosts.publisher.root / name / FILE).open("r+b") as file:
            file.seek(CHUNK_BYTES + 5)
            byte = file.read(1)
            file.seek(CHUNK_BYTES + 5)
            file.write(bytes([byte[0] ^ 1]))
        url = url_of(good.serve("127.0.0.1", 0))
        _, pulls = hosts.transfer(name, url)
        for one in pulls:
            assert one.result().kind == "full"
            assert one.result().sent_by == {url: CHUNK_BYTES, FABRIC: SHORT - CHUNK_BYTES}
            assert "damaged" in one.result().detail
        shutil.copytree(good.root / name, hosts.publisher.root / name, dirs_exist_ok=True)
        assert hosts.have(name)
    finally:
        good.close()


@pytest.mark.parametrize("lost", [0, 1], ids=["middle", "last"])
def test_who_is_killed_and_who_comes_after_pull_the_rest(hosts: Hosts, lost: int):
    name = hosts.publish(LONG)
    _, pulls = hosts.transfer(name)
    for taker in (0, 1):  # its process forwards a chunk before its host has recorded it
        hosts.until_begun(taker, name)
    hosts.signal(lost, signal.SIGKILL)
    kinds = [one.result().kind for one in pulls]
    # Whoever was before it in the chain has seen nothing of it.
    assert kinds == [*[FABRIC] * lost, *["full"] * (2 - lost)]
    for one in pulls[lost:]:
        assert 0 < one.result().sent_by[FABRIC] < LONG
        # Gloo tells of a closed connection, or else nothing comes for STALL_S.
        assert re.search("has ended|by peer|Timed out waiting 5000ms", one.result().detail)
    assert hosts.have(name)


def test_who_hangs_delays_nobody_before_it_and_is_given_up(hosts: Hosts):
    name = hosts.publish(LONG)
    _, pulls = hosts.transfer(name)
    hosts.until_begun(0, name)
    hosts.signal(1, signal.SIGSTOP)
    assert pulls[0].result().kind == FABRIC
    assert not pulls[1].done()
    assert pulls[1].result(WITHIN_S).kind == "full"
    assert hosts.have(name)
    # The next group has all of them again.
    name = hosts.publish(SHORT)
    _, pulls = hosts.transfer(name)
    assert [one.result().kind for one in pulls] == [FABRIC, FABRIC]


def test_a_wrong_interface_and_another_group_are_refused(hosts: Hosts):
    with pytest.raises(AgentRefused, match="no-such-nic"):
        hosts.takers[0].fabric.join("a", "no-such-nic", 0, 2)
    name = hosts.publish(SHORT)
    with pytest.raises(AgentRefused, match="not the one joined"):
        hosts.publisher.send(name, GroupSeat("another", []), WITHIN_S)
