"""What an agent does on a host whose disk is full, and to whom it listens."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libra_cli.config.errors import TrainerError
from libra_cli.node.agent import main
from libra_cli.node.agent.main import Agent
from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.http import carries_token, read_token
from libra_cli.node.processes import log_rotation, proc
from libra_cli.node.processes.private_files import write_private
from libra_cli.node.processes.proc import Marker, boot_id
from libra_cli.node.processes.stop import stop_everything
from libra_cli.node.processes.supervisor import RECORD, Child, Supervisor


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    place: Path = tmp_path / "runs" / f"agent-{os.getpid()}-{tmp_path.name[-20:]}" / "n1"
    place.mkdir(parents=True, mode=0o700)
    monkeypatch.chdir(place)
    return place


@contextmanager
def full_log() -> Iterator[None]:
    """Standard error, which is the agent's log, on a disk without room."""
    kept, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(full)


def test_the_lease_ends_a_run_whose_log_cannot_be_written(run_dir) -> None:
    agent = Agent(run_dir)
    with full_log():
        agent._lease_over()
    assert agent._ended.is_set()


def test_a_token_that_cannot_be_written_leaves_the_one_before(run_dir, monkeypatch) -> None:
    write_private(run_dir / "token", "first")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_private(run_dir / "token", "second")
    assert (run_dir / "token").read_text() == "first"
    assert [one.name for one in run_dir.iterdir()] == ["token"]


def test_a_hello_on_a_full_disk_is_refused_and_its_lease_counts(run_dir, monkeypatch) -> None:
    async def scene() -> None:
        agent = Agent(run_dir)

        def full(path: Path, text: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        monkeypatch.setattr("libra_cli.node.agent.main.write_private", full)
        with pytest.raises(AgentRefused, match="token: No space"):
            await agent._hello("t", 7.0, str(run_dir / "weights"))
        assert 6.0 < agent._lease.left_s <= 7.0

    asyncio.run(scene())


def test_nobody_without_a_token_is_trusted_by_a_process_that_has_none(tmp_path) -> None:
    empty = tmp_path / "token"
    empty.write_text("\n")
    with pytest.raises(TrainerError, match="is empty"):
        read_token(str(empty))
    assert not carries_token(b"Bearer ", "")


def test_the_successor_of_an_agent_knows_the_token_while_anything_lives(run_dir) -> None:
    """An earlier agent has left it; without processes another controller may begin anew."""
    write_private(run_dir / "token", "ours")
    successor = Agent(run_dir)
    assert successor._knows("theirs")
    with process(run_dir) as pid:
        successor._supervisor._children = {c.name: c for c in successor._supervisor._found()}
        assert successor._supervisor.describe()[0]["pid"] == pid
        assert not successor._knows("theirs")
        assert not successor._knows("")
        assert successor._knows("ours")


@contextmanager
def process(run_dir: Path) -> Iterator[int]:
    """A process as an agent starts it."""
    marker = Marker.of(run_dir).environment("server-0")
    environment = {**os.environ, **marker, "LIBRA_TOKEN_FILE": str(run_dir / "token")}
    with subprocess.Popen(["sleep", "100"], env=environment, start_new_session=True) as one:
        try:
            # It runs for an instant before Linux shows its environment.
            deadline = time.monotonic() + 5.0
            while not Path(f"/proc/{one.pid}/environ").read_bytes():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            yield one.pid
        finally:
            one.kill()


def supervisor(run_dir: Path) -> Supervisor:
    return Supervisor(run_dir, Marker.of(run_dir), lambda event: None)


@pytest.mark.parametrize("record", ["", "{", "[]", '{"boot": "x"}', '[{"name": "server-0"}]', None])
def test_a_damaged_record_of_processes_loses_none(run_dir, record) -> None:
    if record is not None:
        (run_dir / RECORD).write_text(record)
    with process(run_dir) as pid:
        made = supervisor(run_dir)

        async def scene() -> None:
            made.open()
            assert made._watch is not None
            made._watch.cancel()

        asyncio.run(scene())
        (row,) = made.describe()
        assert (row["process"], row["pid"], row["state"]) == ("server-0", pid, "running")


def test_ports_of_a_process_that_cannot_be_started_stay_reserved(run_dir) -> None:
    made = supervisor(run_dir)
    (port,) = made.ports.take(22000, 22999, 1, ())
    with pytest.raises(AgentRefused, match="No such file"):
        made.start("server-0", ["/no/such/program"], {}, None, {}, ports=[port])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    made.ports.release([port])


def test_the_ports_of_a_run_that_was_stopped_are_free_for_its_next_life(run_dir) -> None:
    """They stayed reserved beside those that the run asked for then: a small range ran out."""
    first = supervisor(run_dir)
    taken = first.ports.take(22000, 22999, 2, ())
    first.ports.release(taken)  # as the kernel does, when its agent ends
    stop_everything(run_dir)
    successor = supervisor(run_dir)
    successor.ports.open()
    assert successor.ports.take(taken[0], taken[-1], 2, ()) == taken
    successor.ports.release(taken)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_session_is_ours_until_its_leader_is_reaped(run_dir, reaped) -> None:
    """From then on the kernel may give the leader's pid to one of another session."""
    with (
        subprocess.Popen(["true"]) as ended,
        subprocess.Popen(["sleep", "100"], start_new_session=True) as leader,
    ):
        try:
            ended.wait()
            status = proc.status(leader.pid)
            assert status is not None
            popen = ended if reaped else leader
            child = Child("server-0", status.identity, run_dir / "log", 0, "", popen)
            asyncio.run(supervisor(run_dir)._stop_child(child, 5.0))
            assert status.identity.alive is reaped
        finally:
            leader.kill()


def test_processes_of_another_boot_are_nobodys(run_dir) -> None:
    """A pid and a start time since boot may belong to anyone after a reboot."""
    row = {"name": "server-0", "pid": os.getpid(), "started": 1, "log_start": 0, "digest": ""}
    (run_dir / RECORD).write_text(json.dumps({"boot": "another", "processes": [row]}))
    assert supervisor(run_dir)._recorded() == []
    (run_dir / RECORD).write_text(json.dumps({"boot": boot_id(), "processes": [row]}))
    assert len(supervisor(run_dir)._recorded()) == 1


def test_logs_are_kept_within_their_bound_though_old_code_cannot_be_looked_through(
    run_dir, monkeypatch
) -> None:
    def gone_meanwhile(work: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(work))

    monkeypatch.setattr(main, "remove_old_code", gone_meanwhile)
    monkeypatch.setattr(main, "EVERY_S", 0.01)
    agent = Agent(run_dir)
    (run_dir / "logs").mkdir()
    log = run_dir / "logs/server-0.log"
    monkeypatch.setattr(log_rotation.rotate, "__defaults__", (1000,))
    log.write_bytes(b"x" * 2000)

    async def scene() -> None:
        tidying = asyncio.create_task(agent._tidy())
        async with asyncio.timeout(10.0):
            while log.stat().st_size:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        tidying.cancel()

    asyncio.run(scene())
    assert log.with_name("server-0.log.1").stat().st_size == 2000


def test_the_agent_answers_while_a_long_log_is_copied(run_dir, monkeypatch) -> None:
    copied = threading.Event()

    def slowly(logs: list[Path]) -> list[Path]:
        assert copied.wait(10.0), "the loop went on meanwhile"
        return []

    monkeypatch.setattr("libra_cli.node.processes.supervisor.rotate", slowly)

    async def scene() -> None:
        rotating = asyncio.create_task(supervisor(run_dir).rotate_logs())
        await asyncio.sleep(0)
        copied.set()
        await rotating

    asyncio.run(scene())
