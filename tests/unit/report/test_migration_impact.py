"""What a move is said to have cost the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_cli.report.status.migration_impact import migration_impacts
from libra_cli.report.status.plans import moves
from libra_cli.runtime.store.reader import Reader
from tests import sample_run


def test_only_other_servers_count_and_only_what_they_said_in_the_span(tmp_path: Path) -> None:
    run_dir = sample_run.write_moving(tmp_path / "run")
    with Reader(run_dir) as reader:
        told = moves(reader, now=0.0)
        ended = [move for move in told if move.ended_at is not None]
        seen = migration_impacts(reader, told)
        assert [move.move for move, _ in seen] == [move.move for move in ended]
        for move, around in seen:
            began, until = move.started_at, move.ended_at
            assert until is not None
            expected = 0.0
            for turn in reader.turns_between(began, until):
                inside = min(turn.ended_at, until) - max(turn.started_at, began)
                share = inside / (turn.ended_at - turn.started_at)
                expected += turn.generated_tokens * share * (turn.slot != move.slot)
            assert around.during.tokens_per_s == pytest.approx(expected / (until - began))
            steps = [s for s in reader.steps() if s.started_at < until and s.ended_at > began]
            if steps:
                mean = sum(s.ended_at - s.started_at for s in steps) / len(steps)
                assert around.during.step_s == pytest.approx(mean)
