"""Which checkpoints the hosts of a run have."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from libra_cli.core.records import EvaluationRecord
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.trainer.checkpoints import (
    FoundCheckpoint,
    best_of,
    find_checkpoints,
    scored_by,
)


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, Host]:
    made = {}
    for name in ("a", "b", "never"):
        made[name] = Host(name, LocalTransport())
        made[name].run_dir = str(tmp_path / name)
    return made


def save(hosts: dict[str, Host], step: int, *nodes: str, score: float | None = None) -> None:
    for node in nodes:
        directory = Path(hosts[node].run_dir, "checkpoints", f"step-{step:06d}-e1")
        directory.mkdir(parents=True)
        (directory / "checkpoint.json").write_text(json.dumps({"step": step, "score": score}))
        (directory / "ledger.json").write_text(json.dumps({"step": step}))


def test_a_checkpoint_is_found_on_every_host_that_has_its_part(hosts: dict[str, Host]) -> None:
    save(hosts, 20, "a", "b", score=0.5)
    save(hosts, 10, "b", score=0.75)
    Path(hosts["a"].run_dir, "checkpoints", "step-000030-e1").mkdir()  # it is not complete
    found = asyncio.run(find_checkpoints(hosts))
    assert [(one.step, one.nodes) for one in found] == [(10, ("b",)), (20, ("a", "b"))]
    best = best_of(found)
    assert best is not None
    assert best.step == 10


def test_of_checkpoints_without_a_score_none_is_the_best(hosts: dict[str, Host]) -> None:
    save(hosts, 10, "a")
    assert best_of(asyncio.run(find_checkpoints(hosts))) is None


def evaluated(number: int, name: str, step: int, reward: float) -> EvaluationRecord:
    metrics = json.dumps({"avg@1": reward})
    return EvaluationRecord(
        number, name, step, 1, "finished", 1.0, 2.0, 1, 1, 1, 0, float(step), 9, metrics
    )


def test_the_recipes_first_evaluation_scores_though_another_began_before_it(
    hosts: dict[str, Host],
) -> None:
    save(hosts, 10, "a")
    save(hosts, 20, "a")
    rows = [
        evaluated(0, "easy", 10, 0.9),
        evaluated(1, "held-out", 10, 0.2),
        evaluated(2, "easy", 20, 0.8),
        evaluated(3, "held-out", 20, 0.6),
    ]
    found = asyncio.run(find_checkpoints(hosts))
    scored = scored_by(found, rows, ["held-out", "easy"])
    assert [one.score for one in scored] == [0.2, 0.6]
    best = best_of(scored)
    assert best is not None
    assert best.step == 20
    assert scored_by(found, rows, []) == found


def test_a_checkpoint_has_no_score_of_weights_that_the_run_went_back_from() -> None:
    found = [
        FoundCheckpoint(name, step, None, ("a",))
        for name, step in (("step-000010-e1", 10), ("step-000020-e1", 20), ("step-000020-e2", 20))
    ]

    def scores(checkpoints: list[FoundCheckpoint], *told: tuple[int, int, float]) -> list[object]:
        rows = [
            replace(evaluated(number, "held-out", step, reward), trainer_incarnation=incarnation)
            for number, (step, incarnation, reward) in enumerate(told)
        ]
        return [one.score for one in scored_by(checkpoints, rows, ["held-out"])]

    first, lost, again = (10, 1, 0.2), (20, 1, 0.9), (20, 2, 0.5)
    assert scores([found[0], found[2]], first, lost) == [0.2, None]
    assert scores(found, first, lost, again) == [0.2, 0.9, 0.5]
    assert scores(found, first, again) == [0.2, None, 0.5]
    # The trainer that went on from a checkpoint has its weights.
    assert scores(found[:2], first, again) == [0.2, 0.5]
