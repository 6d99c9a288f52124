"""What ``libra gc`` removes on a host, and what it never does."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from libra_cli.node.inventory.collection import DAY_S, old_things, remove, remove_old_code


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


def run(work: Path, name: str, *, days: float, checkpoints: tuple[str, ...] = ()) -> Path:
    """A run's directory on a host in which nothing was written for so many days."""
    node = work / "runs" / name / "n1"
    (node / "logs").mkdir(parents=True)
    (node / "agent.lock").touch()
    (node / "logs/server-0.log").write_text("x" * 100)
    for number, one in enumerate(checkpoints):
        place = node / "checkpoints" / one.rstrip("!")
        place.mkdir(parents=True)
        if not one.endswith("!"):
            (place / "checkpoint.json").write_text("{}")
        at = time.time() - days * DAY_S + number
        os.utime(place, (at, at))
    age(node.parent, days, spare="step-")
    return node


def age(place: Path, days: float, *, spare: str = "\0") -> None:
    at = time.time() - days * DAY_S
    for one in (place, *place.rglob("*")):
        if not one.name.startswith(spare):
            os.utime(one, (at, at))


def gone(work: Path, **rules: Any) -> set[str]:
    found = old_things(work, **rules)
    assert {one.path for one in remove(found)} == {one.path for one in found}
    return {str(Path(one.path).relative_to(work)) for one in found}


def test_of_an_old_dead_run_its_last_whole_checkpoint_stays(work) -> None:
    run(work, "r", days=20, checkpoints=("step-000001-e0", "step-000002-e0", "step-000003-e0!"))
    assert gone(work) == {"runs/r/n1/checkpoints/step-000001-e0", "runs/r/n1/logs"}
    assert gone(work, everything=True) == {"runs/r"}


def test_every_node_s_part_of_the_last_checkpoint_stays_on_a_shared_disk(work) -> None:
    names = ("step-000001-e0", "step-000002-e0")
    run(work, "r", days=20, checkpoints=names)
    other = work / "runs/r/n2/checkpoints"
    for number, one in enumerate(names):
        (other / one).mkdir(parents=True)
        (other / one / "checkpoint.json").write_text("{}")
        at = time.time() - 20 * DAY_S + number + 0.01
        os.utime(other / one, (at, at))
    age(other.parent, 20, spare="step-")
    left = {str(one.relative_to(work)) for one in work.glob("runs/r/*/checkpoints/*")} - gone(work)
    assert left == {f"runs/r/{node}/checkpoints/step-000002-e0" for node in ("n1", "n2")}


def test_what_a_model_is_made_by_stays_with_the_last_checkpoint(work) -> None:
    node = run(work, "r", days=20, checkpoints=("step-000001-e0",))
    for name in ("trainer.json", "server-0.json"):
        (node / name).write_text("{}")
    age(node, 20, spare="step-")
    assert gone(work) == {"runs/r/n1/logs", "runs/r/n1/server-0.json"}
    assert (node / "trainer.json").exists()
    assert gone(work, everything=True) == {"runs/r"}


def test_what_was_written_lately_stays_even_with_all(work) -> None:
    run(work, "r", days=1, checkpoints=("step-000001-e0",))
    assert gone(work) == gone(work, everything=True) == set()


def test_a_dead_run_without_a_checkpoint_goes_whole(work) -> None:
    run(work, "r", days=20)
    run(work, "s", days=20)
    assert gone(work, run="s") == {"runs/s"}


def test_nothing_of_a_live_run_is_old(work) -> None:
    node = run(work, "locked", days=99)
    run(work, f"marked-{os.getpid()}", days=99)
    environment = {**os.environ, "LIBRA_RUN": f"marked-{os.getpid()}", "LIBRA_NODE": "n1"}
    with (
        (node / "agent.lock").open() as lock,
        subprocess.Popen(["sleep", "60"], env=environment) as process,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            assert gone(work, days=0.0, everything=True) == set()
        finally:
            process.kill()


def test_a_run_that_is_resumed_and_code_that_is_used_meanwhile_stay(work) -> None:
    node = run(work, "resumed", days=99, checkpoints=("step-000001-e0", "step-000002-e0"))
    run(work, "dead", days=99)
    (work / "code/used").mkdir(parents=True)
    age(work / "code/used", 20)
    found = old_things(work)
    assert len(found) == 4
    environment = {**os.environ, "PYTHONPATH": str(work / "code/used")}
    with (
        (node / "agent.lock").open() as lock,
        subprocess.Popen(["sleep", "60"], env=environment) as process,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            assert [one.path for one in remove(found)] == [str(work / "runs/dead")]
        finally:
            process.kill()
    assert (node / "checkpoints/step-000001-e0").is_dir()


def test_code_goes_when_no_run_used_it_and_no_process_does(work) -> None:
    for name in ("used", "new", "old", "held.damaged-1", "x.damaged-2"):
        (work / "code" / name).mkdir(parents=True)
    age(work / "code/used", 20)
    age(work / "code/old", 20)
    held = os.pathsep.join([str(work / "code/used"), str(work / "code/held.damaged-1")])
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "PYTHONPATH": held}) as process:
        try:
            found = remove_old_code(work)
        finally:
            process.kill()
    assert {Path(one.path).name for one in found} == {"old", "x.damaged-2"}


def test_code_in_use_is_known_by_any_path_that_leads_there(work, tmp_path) -> None:
    (work / "code/used").mkdir(parents=True)
    age(work / "code/used", 20)
    (tmp_path / "home").symlink_to(work)
    for path in (f"{tmp_path}/home/code/used", f"{work}//code/used/"):
        with subprocess.Popen(["sleep", "60"], env={**os.environ, "PYTHONPATH": path}) as process:
            try:
                assert remove_old_code(work) == []
            finally:
                process.kill()


def test_what_is_left_of_a_checkpoint_that_was_being_written_goes(work) -> None:
    node = run(work, "r", days=20, checkpoints=("step-000001-e0",))
    (node / "checkpoints/.step-000002-e0").mkdir()
    assert "runs/r/n1/checkpoints/.step-000002-e0" in gone(work)
    assert (node / "checkpoints/step-000001-e0").exists()


def test_a_link_among_runs_or_code_is_left_alone(work, tmp_path) -> None:
    elsewhere = tmp_path / "elsewhere"
    run(elsewhere, "r", days=99)
    (work / "runs").mkdir(parents=True)
    (work / "code").mkdir()
    (work / "runs/r").symlink_to(elsewhere / "runs/r")
    (work / "code/x.damaged-1").symlink_to(elsewhere)
    assert gone(work, everything=True) == set()
