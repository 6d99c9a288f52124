"""Moves on three real SSH hosts in the middle of which things break.

A worker that is killed between moves, a cable that is cut and a core that dies are in every run of
``test_chaos``; here they come while a slot is on its way.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_moves import (
    GROUPS,
    LEASE_S,
    STOPPED,
    WEIGHTS,
    Scene,
    check_hosts,
    check_rewards,
    check_trajectories,
    play,
    workdir_with,
)
from tests.live import START_S, STEP_S, require
from tests.netns import missing

pytestmark = [
    pytest.mark.integration,
    pytest.mark.alone,
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
require("vllm")


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Scene]:
    """A run in which a joining worker, a working one, a cable and the core fail, in this order.

    Each step has two updates, of which workers share the first.
    """
    workdir = workdir_with(models, tmp_path_factory.mktemp("hosts"))
    with play(tmp_path_factory, workdir, minibatches=2) as scene:
        run = scene.run
        scene.order("gradient=1")
        _wait_phase(scene, "start")
        run.signal_all("gradient-0", scene.hybrid, signal.SIGKILL)
        scene.arrive()
        scene.order("gradient=1")
        scene.arrive()
        _kill_in_mid_step(scene)
        _wait_used_by_another(scene)
        scene.order("rollout=2,gradient=0")
        _wait_phase(scene, "start")
        scene.net.cut(scene.net.hosts[1])
        lost = f"SELECT 1 FROM nodes WHERE node = '{scene.hybrid}' AND state = 'unreachable'"
        run.wait("loss of the host", lambda: run.query(lost), timeout_s=LEASE_S)
        run.kill("trainer-0", scene.core)
        scene.net.heal(scene.net.hosts[1])
        scene.arrive()
        again = "SELECT 1 FROM versions WHERE trainer_incarnation = 2"
        run.wait("another core", lambda: run.query(again), timeout_s=START_S)
        scene.more_steps(3)
        scene.stop()
        yield scene


def _wait_phase(scene: Scene, phase: str) -> None:
    """Until the process of that phase is there."""
    sql = f"SELECT 1 FROM moves WHERE state = '{phase}' ORDER BY move DESC LIMIT 1"
    role = scene.moves()[-1][1]
    process = {"gradient": "gradient-0", "rollout": "server-0"}[role]
    markers = (f"LIBRA_PROCESS={process}", f"LIBRA_NODE={scene.hybrid}")
    scene.run.wait(
        f"phase {phase}",
        lambda: scene.run.query(sql) and scene.run.processes(*markers),
        timeout_s=STEP_S,
    )


def _kill_in_mid_step(scene: Scene) -> None:
    """Kill the worker as soon as there is a directory for the gradients of its next share."""
    run = scene.run
    *_, rank = run.processes("LIBRA_PROCESS=gradient-0", f"LIBRA_NODE={scene.hybrid}")
    memory = Path(f"/proc/{rank}/root{WEIGHTS}")  # as that host sees it
    before = _shares_in(memory)
    run.wait(
        "another share",
        lambda: _shares_in(memory) - before,
        timeout_s=STEP_S,
        every_s=0.002,
    )
    run.signal_all("gradient-0", scene.hybrid, signal.SIGKILL)


def _shares_in(memory: Path) -> set[Path]:
    """The directories of shares; versions beside them may go while they are looked for."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            return set(memory.glob("*/*/step-*"))
    raise AssertionError(f"{memory} never stands still")


def _wait_used_by_another(scene: Scene) -> None:
    """Until a worker that was started after the killed one has been of use."""
    killed = max(share["incarnation"] for _, share in scene.shares())
    scene.run.wait(
        "a share of another worker",
        lambda: [s for _, s in scene.shares() if s["used"] and s["incarnation"] > killed],
        timeout_s=START_S,
    )


def test_a_worker_killed_while_it_joins_leaves_the_slot_where_it_was(troubled):
    before, after, state, _, detail = troubled.moves()[0]
    assert (before, after, state) == ("rollout", "gradient", "failed")
    assert "goes on as rollout" in detail
    ((began, ended),) = troubled.run.query("SELECT started_at, ended_at FROM moves WHERE move = 1")
    left = f"""SELECT count(*) FROM slot_states WHERE slot = '{troubled.slot}'
        AND role = 'rollout' AND state != 'serving' AND since BETWEEN {began} AND {ended}"""
    assert troubled.run.query(left) == [(0,)], "the server served all the while"


def test_the_step_of_a_killed_worker_is_done_without_it(troubled):
    unused = [share for _, share in troubled.shares() if not share["used"]]
    assert unused
    assert all(share["reason"] for share in unused)
    steps = [step for (step,) in troubled.run.query("SELECT step FROM steps ORDER BY step")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_killed_worker_is_started_again_and_used_again(troubled):
    used = {share["incarnation"] for _, share in troubled.shares() if share["used"]}
    assert len(used) == 2


def test_a_move_goes_on_when_its_host_is_back_and_while_the_core_restarts(troubled):
    told = [(before, after, state) for before, after, state, _, _ in troubled.moves()]
    assert told[1:] == [("rollout", "gradient", "done"), ("gradient", "rollout", "done")]
    seen = {kind for (kind,) in troubled.run.query("SELECT DISTINCT kind FROM events")}
    assert {"NodeLost", "NodeBack", "TrainerFailed"} <= seen
    incarnations = troubled.run.query(
        "SELECT DISTINCT trainer_incarnation FROM versions ORDER BY 1"
    )
    assert incarnations == [(1,), (2,)]


def test_a_troubled_run_goes_on_to_its_end(troubled):
    assert troubled.run.process.returncode == STOPPED, troubled.run.told()
    assert min(troubled.run.groups_of_steps()) >= GROUPS, "no group counts for two steps"
    failed = "SELECT detail FROM trajectories WHERE state = 'failed'"
    assert troubled.run.query(failed) == []


def test_trouble_loses_no_trajectory(troubled):
    check_trajectories(troubled)


def test_trouble_scores_nothing_that_did_not_finish(troubled):
    check_rewards(troubled)


def test_trouble_leaves_nothing_on_any_host(troubled):
    check_hosts(troubled)
