"""A server of the run is killed in the middle, nothing else is, and the picture shows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from libra_cli.api import load_run
from libra_cli.core import records as r
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from tests.gallery.facts import Curve, Facts, Timeline
from tests.gallery.fault import Killer, timeline_of
from tests.gallery.page import page
from tests.gallery.picture import picture
from tests.sample_run import HYBRID, SERVERS, START, run_record, slot_record, write_moving

RUN = "elastic-1"
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is marked as the server of the first slot of ``RUN``."""
    environment = {**os.environ, "LIBRA_RUN": RUN, "LIBRA_PROCESS": "server-0"}
    with subprocess.Popen(SLEEP, env=environment, start_new_session=True) as process:
        yield process
        process.kill()


def write(place: Path, step: int, pid: int) -> None:
    """A run of 40 steps after so many, whose first slot serves."""
    with Journal(place / "runs" / RUN) as journal:
        journal.save(run_record(id=RUN, step=step))
        journal.save(slot_record(SERVERS[0], "rollout", "serving", START))
        journal.save(r.ProcessRecord("local", "server-0", pid, "running", START, None, ""))


def test_a_server_is_killed_once_half_of_the_steps_are_done(
    tmp_path: Path, server: subprocess.Popen[bytes]
) -> None:
    killer = Killer(tmp_path, lambda text: None)
    begins = tmp_path / "runs" / "another" / "libra.db"
    begins.parent.mkdir(parents=True)
    begins.touch()
    write(tmp_path, 19, server.pid)
    killer.look()
    assert (killer.at, server.poll()) == (0.0, None)
    write(tmp_path, 20, server.pid)
    killer.look()
    assert server.wait(10) == -signal.SIGKILL
    assert killer.slot == SERVERS[0]


def test_a_process_that_is_no_server_of_the_run_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(SLEEP, start_new_session=True) as other:
        write(tmp_path, 20, other.pid)
        killer = Killer(tmp_path, lambda text: None)
        killer.look()
        assert (killer.at, other.poll()) == (0.0, None)
        other.kill()


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    run_dir = write_moving(tmp_path_factory.mktemp("killed") / "run")
    with Reader(run_dir) as reader:
        at = next(row.since for row in reader.slot_history() if row.state == "failed")
    return timeline_of(load_run(run_dir), Killer(run_dir, lambda text: None, HYBRID, at - 0.1))


def test_a_timeline_has_slots_moves_and_the_time_without_a_server(known: Timeline) -> None:
    assert [lane.slot for lane in known.lanes] == [*SERVERS, "local/2"]
    assert [move.to for move in known.moves] == ["gradient", "rollout"]
    assert known.kill is not None
    assert 5 < known.kill.serves_again_at - known.kill.at < 10


def test_a_run_whose_server_never_came_back_has_no_timeline(tmp_path: Path) -> None:
    run = load_run(write_moving(tmp_path / "run"))
    late = Killer(tmp_path, lambda text: None, HYBRID, run.steps[-1].ended_at + 1e6)
    with pytest.raises(ValueError, match="never served again"):
        timeline_of(run, late)


def test_picture_and_page_tell_the_kill_and_the_moves(known: Timeline, facts: Facts) -> None:
    seconds = known.lanes[0].states[-1][1]
    curve = Curve(metric="reward/mean", values=[0.2, 0.8], ended_at=[seconds / 2, seconds])
    told = facts.model_copy(update={"name": "elastic", "timeline": known, "curve": curve})
    words = [text.text for text in ElementTree.fromstring(picture(told)).iter() if text.text]
    assert any("server of local/1 killed (kill -9)" in word for word in words)
    assert "local/1 to gradient" in words
    assert "the vLLM server of local/1, which served again after" in page([told])
