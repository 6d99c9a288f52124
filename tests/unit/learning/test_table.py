"""The tables of ``tests.learning``: rows by settings, and differences paired by seed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.learning.table import NUMBERS, differences, table


def run(staleness: int, seed: int, value: float, label: str = "") -> dict[str, Any]:
    settings = [["training.loss_args.beta", 0.1]]
    what = {"recipe": "a.yaml", "steps": 40, "loss": "tba", "label": label, "settings": settings}
    played = {"trained": 40, "played": 5120, "cpu_s": 60.0}
    return {**what, "staleness": staleness, "seed": seed, **dict.fromkeys(NUMBERS, value), **played}


def cells(text: str) -> list[list[str]]:
    """The rows of a table in Markdown, without its head."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_runs_that_differ_in_the_seed_only_are_one_row():
    (mild, hard) = cells(table([run(0, 0, 0.9), run(0, 1, 0.7), run(8, 0, 0.5)]))
    assert mild[:6] == ["a.yaml", "40", "tba", "training.loss_args.beta=0.1", "0", "2"]
    assert mild[6] == "0.800 ± 1.271"  # two seeds: 0.1 of standard error times 12.71
    assert hard[4:7] == ["8", "1", "0.500"]


def test_differences_are_of_the_same_seed_and_of_rows_that_have_a_baseline():
    runs = [run(0, 0, 0.9), run(0, 1, 0.7), run(8, 0, 0.5), run(8, 1, 0.4), run(8, 2, 0.0)]
    other = run(8, 0, 0.1, label="another")
    (row,) = cells(differences([*runs, other], "staleness=0"))
    assert row[4:7] == ["8", "2", "-0.350 ± 0.635"]
    assert row[3] != "another"
    (row,) = cells(differences([*runs[2:], other], "label=training.loss_args.beta=0.1"))
    assert row[3:7] == ["another", "8", "1", "-0.400"]


def test_a_baseline_that_tells_no_rows_apart_is_refused():
    with pytest.raises(ValueError, match="seed"):
        differences([run(0, 0, 0.9)], "seed=0")
