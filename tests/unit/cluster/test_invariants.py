"""The invariants of a disturbed run notice each thing they are there for."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.cluster.invariants import losses, violations

TABLES = {
    "runs": "state, error, step",
    "steps": "step, generated_tokens, batch_json",
    "groups": "group_id, state, step, reward, detail",
    "late": "group_id, member, step",
    "trajectories": "group_id, member, attempt, state, reward, generated_tokens, spans_json",
    "versions": "version, trainer_incarnation",
    "events": "kind, payload_json, seq INTEGER PRIMARY KEY",
}
SOUND = [
    "INSERT INTO runs VALUES ('stopped', '', 2)",
    "INSERT INTO steps VALUES (1, 30, '{\"trajectories_late\": 0}')",
    "INSERT INTO steps VALUES (2, 40, '{\"trajectories_late\": 1}')",
    "INSERT INTO groups VALUES (0, 'trained', 1, 0.5, 'closed without 1 unfinished members')",
    "INSERT INTO groups VALUES (1, 'trained', 2, 0.5, '')",
    "INSERT INTO late VALUES (0, 1, 2)",
    "INSERT INTO trajectories VALUES (0, 0, 0, 'failed', NULL, 3, '[[9, 8, 11]]')",
    "INSERT INTO trajectories VALUES (0, 0, 1, 'finished', 1.0, 30, '[[0, 8, 38]]')",
    "INSERT INTO trajectories VALUES (0, 1, 0, 'finished', 0.0, 10, '[]')",
    "INSERT INTO trajectories VALUES (1, 0, 0, 'finished', 0.0, 30, '[]')",
    "INSERT INTO versions VALUES (0, 1), (1, 1), (1, 2), (2, 2)",
]


def event(kind: str, **payload: object) -> str:
    return f"INSERT INTO events VALUES ('{kind}', '{json.dumps(payload)}', NULL)"


SYNCED = event("ServerSynced", slot="a/0", incarnation=0, published={"version": [1, 0]})
SPAN = {"version": 0, "start": 0, "end": 30}
TURN = event(
    "TurnGenerated", slot="a/0", incarnation=0, trajectory="0.0.1", prompt_ids=8, spans=[SPAN]
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "recipe.json").write_text('{"training": {"groups_per_step": 1}}')
    do(tmp_path, *[f"CREATE TABLE {name} ({columns})" for name, columns in TABLES.items()])
    do(tmp_path, *SOUND, SYNCED, TURN)
    return tmp_path


def do(run_dir: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run_dir / "libra.db")) as database, database:
        for statement in statements:
            database.execute(statement)


def test_a_sound_run_violates_nothing(run_dir):
    assert violations(run_dir) == []
    assert losses(run_dir).trained == 3


def test_a_late_member_of_a_group_that_was_trained_whole_after_a_rollback_is_not_late(run_dir):
    do(run_dir, "INSERT INTO late VALUES (1, 0, 2), (0, 0, NULL)")
    assert violations(run_dir) == []


def test_of_a_group_that_was_trained_again_without_another_member_the_newest_counts(run_dir):
    """Before the rollback member 0 was late, in step 2; afterwards member 1 was."""
    do(run_dir, "DELETE FROM late", "INSERT INTO late VALUES (0, 0, 2), (0, 1, 2)")
    assert violations(run_dir) == []


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("steps", "DELETE FROM steps WHERE step = 1"),
        ("steps", "UPDATE runs SET step = 3"),
        ("once", "UPDATE groups SET step = 2, detail = '' WHERE group_id = 0"),
        ("once", "UPDATE late SET step = 1"),
        ("once", "UPDATE trajectories SET state = 'dropped', reward = NULL WHERE group_id = 1"),
        ("failed", "UPDATE trajectories SET reward = 0 WHERE state = 'failed'"),
        ("failed", "INSERT INTO trajectories VALUES (1, 0, 1, 'finished', 0.0, 0, '[]')"),
        ("failed", "UPDATE groups SET reward = NULL"),
        ("versions", "UPDATE versions SET version = 3 WHERE version = 2"),
        ("versions", "DELETE FROM versions WHERE version = 1"),
        (
            "proved",
            "UPDATE events SET payload_json = replace(payload_json, 'a/0', 'b/0') WHERE seq = 1",
        ),
        ("proved", "UPDATE trajectories SET spans_json = '[[1, 8, 38]]' WHERE attempt = 1"),
        ("prompts", "INSERT INTO groups VALUES (3, 'open', NULL, NULL, '')"),
        ("end", "UPDATE runs SET state = 'failed'"),
    ],
)
def test_a_violation_is_found(run_dir, what, change):
    do(run_dir, change)
    assert {line.partition(":")[0] for line in violations(run_dir)} == {what}
