"""The command that says where moving pays: what it simulates, keeps and prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from libra_cli.bench.jobs import Job
from libra_cli.bench.regret import PARTS
from tests.research import moving
from tests.research.moving import Run
from tests.unit.bench.test_regret import JOB

STEPS = 24


def invented(run: object, jobs: Sequence[Job], say: Callable[[str], None]) -> Iterator[Run]:
    """Static plans are the better in the first half the more GPUs serve, and in the second the
    fewer do; a clairvoyant needs as long as the best of them in each half, and libra a tenth more.
    """
    for job in jobs:
        if job.layout is not None:
            share = job.layout.rollout_gpus / job.gpus
            halves = [10 * (2 - share), 10 * (1 + share)]
        else:
            halves = [12.5 if job.script else 13.75] * 2
        if job.script:
            assert job.script[0].rollout_gpus > job.script[-1].rollout_gpus
            assert len(job.script) == PARTS
        ends = [halves[0] * at for at in range(1, STEPS // 2 + 1)]
        ends += [ends[-1] + halves[1] * at for at in range(1, STEPS // 2 + 1)]
        yield Run(1e6 / ends[-1], 4 * bool(job.script), tuple(ends))


def command(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    typed = ["moving", "--trace", "mint", "--drift", "1/4", "--seeds", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", typed)
    moving.main()


def test_who_moves_is_compared_with_who_stays_on_the_same_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(moving, "simulated", invented)
    command(monkeypatch, tmp_path / "runs.jsonl")
    first = capsys.readouterr().out
    # Every static plan takes 360 s, the clairvoyant 300 s, and libra 330 s.
    line = first.splitlines()[-1]
    assert "drift x1 / x4 | +20.0 ± 0.0 | +9.1 ± 0.0 | +0.0 ± 0.0 | 4, 0 |" in line

    def no_more(run: object, jobs: Sequence[Job], say: Callable[[str], None]) -> Iterator[Run]:
        raise AssertionError("what is in the file is not simulated again")

    monkeypatch.setattr(moving, "simulated", no_more)
    command(monkeypatch, tmp_path / "runs.jsonl")
    assert capsys.readouterr().out == first


def test_a_run_that_is_simulated_knows_its_steps_and_its_tokens() -> None:
    run = moving.played(JOB)
    assert len(run.ended) == JOB.steps
    assert run.throughput * run.ended[-1] > JOB.steps
    assert moving.key_of(JOB) != moving.key_of(replace(JOB, seed=1))
