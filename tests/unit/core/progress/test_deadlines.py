"""Nothing in the lifecycle tables waits for ever, and the table's numbers are those in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from libra_cli.config.environment import EnvironmentSpec, TeacherSpec
from libra_cli.config.recipe import RunSpec, WeightSyncSpec
from libra_cli.core.cluster import replica, trainer_life
from libra_cli.core.reconcile import migration
from libra_cli.core.rollout import active, groups
from libra_cli.core.run import state as run_state
from libra_cli.runtime.hosts import cluster
from libra_cli.runtime.processes import owner
from libra_cli.runtime.rollout import connection
from libra_cli.runtime.vllm import client
from tests.unit.core.progress import deadlines
from tests.unit.core.progress.deadlines import WAITS, Wait

TABLES: dict[str, Mapping[Any, object]] = {
    "replica": replica.TRANSITIONS,
    "trainer": trainer_life.TRANSITIONS,
    "group": groups.TRANSITIONS,
    "trajectory": active.TRANSITIONS,
    "run": run_state.TRANSITIONS,
    "move": migration.LIFECYCLE,
}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_state_has_a_deadline_or_a_reason_for_none(name: str) -> None:
    states = type(next(iter(TABLES[name])))
    told = WAITS[states]
    assert set(told) == set(TABLES[name])
    for state, wait in told.items():
        assert wait, state
        if isinstance(wait, Wait):
            assert wait.ended_by, state
            assert wait.otherwise, state
            assert 0 < wait.deadline_s <= 3600, state


def test_every_lifecycle_table_of_the_core_is_walked() -> None:
    assert {type(next(iter(table))) for table in TABLES.values()} == set(WAITS)


def test_the_numbers_are_those_that_the_runtime_and_the_recipe_use() -> None:
    assert deadlines.START_S == owner.STARTUP_TIMEOUT_S
    assert deadlines.TURN_S == client.GENERATE_TIMEOUT_S
    assert WeightSyncSpec().timeout_s == deadlines.TRANSFER_S
    assert connection.SLEEP_S == deadlines.SLEEP_S
    assert RunSpec.model_fields["lease_s"].default == deadlines.LEASE_S
    assert deadlines.STOP_S == deadlines.LEASE_S + cluster.STOP_GRACE_S
    assert EnvironmentSpec.model_fields["tool_timeout_s"].default == deadlines.CALL_S
    assert TeacherSpec.model_fields["patience_s"].default == deadlines.TEACHER_S
