"""When a run makes the models of its checkpoints, each of them once."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libra_cli.core.events import CheckpointSaved
from libra_cli.core.records import ExportRecord
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.trainer import run_exports as module
from libra_cli.runtime.trainer.checkpoints import FoundCheckpoint
from libra_cli.runtime.trainer.run_exports import RunExports
from tests import world

STEPS = 4


def checkpoint(step: int, score: float) -> FoundCheckpoint:
    return FoundCheckpoint(f"step-{step}", step, score, ("n",))


class Made(list[int]):
    """The steps of the models that were made, in order; takes the place of ``ModelExports``."""

    async def make(self, checkpoint: FoundCheckpoint, *, merge: bool) -> ExportRecord:
        self.append(checkpoint.step)
        return ExportRecord(checkpoint.step, "n", checkpoint.name, 0.0, 1, 1.0, checkpoint.score)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    async def found(hosts: object) -> list[FoundCheckpoint]:
        return [checkpoint(2, 0.9), checkpoint(4, 0.5)]

    steps = Made()
    reader = SimpleNamespace(evaluations=list)
    monkeypatch.setattr(module, "find_checkpoints", found)
    monkeypatch.setattr(module, "Reader", lambda run_dir: nullcontext(reader))
    monkeypatch.setattr(module, "ModelExports", lambda *args: steps)
    return steps


def run_of(
    made: Made, export: dict[str, Any], *, saved: tuple[int, ...], **sections: Any
) -> tuple[list[int], ...]:
    """What has been made when checkpoints were saved and nobody had asked for the end yet, and
    after it."""

    async def run() -> tuple[list[int], ...]:
        recipe = world.recipe(
            run={"name": "r", "steps": STEPS},
            training={"checkpoint_every": 2, "export": export},
            **sections,
        )
        cluster = cast(Cluster, SimpleNamespace(reached={}, facts={}, secrets=None))
        kept: list[object] = []
        exports = RunExports(
            recipe, cluster, Path("run"), lambda step: {}, save=kept.append, note=lambda text: None
        )
        for step in saved:
            exports.saved(CheckpointSaved(1, step, f"/run/checkpoints/step-{step}"))
        await exports._making.wait()
        before = list(made)
        await exports.leave()
        await exports.close()
        assert len(kept) == len(made), "each is written down once"
        return before, list(made)

    return asyncio.run(run())


def test_the_models_that_stay_are_made_while_servers_end(made: Made):
    assert run_of(made, {}, saved=(2, 4)) == ([4, 2], [4, 2])


def test_what_an_evaluation_may_still_find_best_is_made_after_it(made: Made):
    evaluation = {"name": "held-out", "every": 2, "samples": 1}
    told = run_of(made, {}, saved=(2, 4), evaluation=[evaluation])
    assert told == ([4], [4, 2])


def test_a_model_that_was_made_on_the_way_is_not_made_again(made: Made):
    assert run_of(made, {"every": 1}, saved=(2, 4)) == ([2, 4], [2, 4])
    made.clear()
    assert run_of(made, {"every": 2, "at_end": []}, saved=(2, 4)) == ([4], [4])


def test_where_nothing_stays_nothing_is_made(made: Made):
    assert run_of(made, {"at_end": []}, saved=(2, 4)) == ([], [])


def test_a_run_that_is_stopped_early_makes_its_last_model_at_the_end(made: Made):
    assert run_of(made, {"at_end": "last"}, saved=(2,)) == ([], [4])
