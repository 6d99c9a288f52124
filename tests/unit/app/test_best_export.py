"""Which checkpoint ``libra export --best`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_cli.app import export as module
from libra_cli.app.export import ExportOrder
from libra_cli.core.records import ExportRecord
from libra_cli.runtime.trainer.checkpoints import FoundCheckpoint
from tests.sample_run import write_whole


class Made:
    """Takes the place of ``ModelExports``."""

    async def make(self, checkpoint: FoundCheckpoint, *, merge: bool) -> ExportRecord:
        return ExportRecord(checkpoint.step, "n", checkpoint.name, 0.0, 1, 1.0, checkpoint.score)


@pytest.mark.parametrize(
    ("scores", "step", "told"),
    [
        ((0.9, 0.5), 1, []),
        ((None, None), 2, ["no checkpoint has a score: step 2, the last, stands for the best"]),
    ],
)
def test_the_last_stands_for_the_best_where_none_has_a_score_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scores: tuple[float | None, ...],
    step: int,
    told: list[str],
) -> None:
    async def reach(*given: Any) -> dict[str, Any]:
        return {}

    async def found(hosts: object) -> list[FoundCheckpoint]:
        return [FoundCheckpoint(f"step-{n}", n, one, ("n",)) for n, one in enumerate(scores, 1)]

    monkeypatch.setattr(module, "_reach", reach)
    monkeypatch.setattr(module, "find_checkpoints", found)
    monkeypatch.setattr(module, "ModelExports", lambda *given: Made())
    noted: list[str] = []
    made = module.export(write_whole(tmp_path / "run"), ExportOrder(best=True), noted.append)
    assert (made.step, noted) == (step, told)
