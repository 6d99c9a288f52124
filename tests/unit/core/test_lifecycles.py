"""Whatever has a state changes it along its table, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from libra_cli.config.errors import IllegalMove
from libra_cli.core.cluster import replica, trainer_life
from libra_cli.core.cluster.replica import Replica, ReplicaState, slot_record
from libra_cli.core.rollout import active, groups
from libra_cli.core.rollout.active import ActiveTrajectory, Stage
from libra_cli.core.rollout.groups import GroupLedger
from libra_cli.core.rollout.staleness import hold
from libra_cli.core.run import state as run_state
from libra_cli.core.run.state import Phase, RunIdentity, RunState
from libra_cli.core.types import Pool, Role, Slot, Trajectory, TrajectoryId

TABLES: dict[str, Mapping[Any, Mapping[Any, str]]] = {
    "replica": replica.TRANSITIONS,
    "trainer": trainer_life.TRANSITIONS,
    "group": groups.TRANSITIONS,
    "trajectory": active.TRANSITIONS,
    "run": run_state.TRANSITIONS,
}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_state_has_its_changes_and_each_change_its_cause(name: str) -> None:
    table = TABLES[name]
    kind: Any = type(next(iter(table)))
    states = set(kind)
    assert set(table) == states
    assert all(set(changes) <= states for changes in table.values())
    assert all(cause for changes in table.values() for cause in changes.values())


def test_a_replica_that_may_not_change_so_keeps_its_state_and_tells_its_past() -> None:
    one = Replica(Slot("a/0", "a", (), Pool.ROLLOUT), since=0.0)
    one.move(ReplicaState.STARTING, now=1.0)
    with pytest.raises(IllegalMove, match=r"slot a/0 .*idle -> starting at 1.0 s.*-> draining"):
        one.move(ReplicaState.DRAINING, now=2.0)
    assert (one.state, one.since) == (ReplicaState.STARTING, 1.0)


def test_a_server_has_served_for_as_long_as_requests_might_be_inside_it() -> None:
    one, states = Replica(Slot("a/0", "a", (), Pool.ROLLOUT), since=0.0), ReplicaState
    one.role = Role.ROLLOUT
    for now, state in {1.0: states.STARTING, 3.0: states.JOINING, 4.0: states.SERVING}.items():
        one.move(state, now=now)
    assert one.serving_s == 0.0
    assert slot_record(one, now=6.0, waiting=0).serving_s == 2.0
    one.move(states.DRAINING, now=9.0)
    assert one.serving_s == 5.0
    assert slot_record(one, now=9.5, waiting=0).serving_s == 5.5
    one.move(states.STOPPING, now=11.5)
    one.move(states.IDLE, now=20.0)
    assert one.serving_s == slot_record(one, now=30.0, waiting=0).serving_s == 7.5


def test_a_trajectory_cannot_generate_before_it_has_a_prompt() -> None:
    one = ActiveTrajectory(Trajectory(TrajectoryId(3, 1)))
    with pytest.raises(IllegalMove, match=r"3\.1\.0: resetting -> generating"):
        one.enter(Stage.GENERATING)
    assert one.stage is Stage.RESETTING


def test_a_run_ends_only_once_everything_is_stopped() -> None:
    run = RunState(RunIdentity("run", "recipe.yaml", 1, 1.0), target_steps=1)
    with pytest.raises(IllegalMove, match="the run: starting -> ended"):
        run.enter(Phase.ENDED)
    assert run.phase is Phase.STARTING


def test_a_group_that_was_never_claimed_cannot_be_trained() -> None:
    ledger = GroupLedger(group_size=1, groups_per_step=1, rule=hold(0), retries=0)
    group = ledger.open(version=0, now=0.0)
    ledger.finish(group.members[0].id, 1.0)
    group.step = 1
    with pytest.raises(IllegalMove, match="group 0: ready -> trained"):
        ledger.trained(1)
    assert group.state is groups.GroupState.READY
    assert ledger.count(groups.GroupState.READY) == 1
