"""The page of benchmarks is what its figures make, and a figure that got worse is marked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import made_page
from tests.benchmarks import __main__ as command
from tests.benchmarks import figures as kept
from tests.benchmarks.figures import FOLDER, FaultKind, Figure, Measured, Measurement, is_worse
from tests.benchmarks.page import files, page
from tests.benchmarks.suites import SUITES, Result, Suite, measure
from tests.gallery.facts import Machine
from tests.load.__main__ import COLUMNS
from tests.made_page import EntryFailed, MadePage

MACHINE = Machine(
    cpu="Xeon", cores=2, memory_gib=24, gpus=[], load=0.5, versions={"torch": "2"}, commit="abc"
)
LARGEST = 20_000


def measured(*figures: Figure, machine: Machine = MACHINE) -> Measurement:
    return Measurement(
        day="2026-01-31", machine=machine, seconds=9, figures=[*figures], faults=[], checks=[]
    )


def shipped() -> list[Measured]:
    return [one for name in SUITES if (one := kept.read(name)) is not None]


# -- the page that ships ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", files(shipped()), ids=lambda path: path.name)
def test_the_page_is_what_the_figures_make(path: Path) -> None:
    made = files(shipped())[path]
    assert path.read_text(encoding="utf-8") == made, "python -m tests.benchmarks --draw"


def test_every_file_of_figures_is_of_a_suite_and_small() -> None:
    assert [path.name for path in FOLDER.glob("*") if path.stem not in SUITES] == []
    assert [path.name for path in FOLDER.glob("*") if path.stat().st_size > LARGEST] == []


# -- what is worse ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "less_is_better", "worse"),
    [
        (121, True, True),
        (119, True, False),
        (50, True, False),
        (79, False, True),
        (81, False, False),
    ],
)
def test_worse_is_by_more_than_the_noise(now: float, less_is_better: bool, worse: bool) -> None:
    before = Figure(what="plan", value=100, unit="s", less_is_better=less_is_better)
    assert is_worse(before.model_copy(update={"value": now}), before) is worse


def test_a_measurement_is_kept_beside_the_one_before(tmp_path: Path) -> None:
    slow, fast = (Figure(what="plan", value=value, unit="s") for value in (2.0, 1.0))
    kept.keep("decisions", measured(fast), tmp_path)
    kept.keep("decisions", measured(slow), tmp_path)
    known = kept.read("decisions", tmp_path)
    assert known is not None
    assert "| plan | 2 | 1 | s | 20% | **worse** |" in page([known])
    kept.keep("decisions", measured(slow), tmp_path)
    again = kept.read("decisions", tmp_path)
    assert again is not None
    assert "**worse** |" not in page([again])


def test_another_machine_is_not_compared_with() -> None:
    other = MACHINE.model_copy(update={"cores": 64})
    slow, fast = (Figure(what="plan", value=value, unit="s") for value in (2.0, 1.0))
    known = Measured(suite="decisions", newest=measured(slow), before=measured(fast, machine=other))
    assert "| plan | 2 | - | s | 20% |  |" in page([known])


def test_what_was_measured_beside_other_work_is_not_compared_with(tmp_path: Path) -> None:
    busy = MACHINE.model_copy(update={"load": 9.0})
    quick, slow = (Figure(what="plan", value=value, unit="s") for value in (1.0, 2.0))
    for newest in (measured(quick), measured(quick, machine=busy), measured(slow, machine=busy)):
        kept.keep("decisions", newest, tmp_path)
    known = kept.read("decisions", tmp_path)
    assert known is not None
    assert "| plan | 2 | - | s | 20% |  |" in page([known])
    kept.keep("decisions", measured(slow), tmp_path)
    quiet = kept.read("decisions", tmp_path)
    assert quiet is not None
    assert "| plan | 2 | 1 | s | 20% | **worse** |" in page([quiet])


# -- what commands print ---------------------------------------------------------------------------


def test_recoveries_are_counted_by_kind(tmp_path: Path) -> None:
    told = {"server killed": [20.0, 30.04, None], "reboot": [], "controller killed": [5.0]}
    (tmp_path / "result.json").write_text(json.dumps(told))
    said = "/runs/chaos-1: {}\n9 bytes a step\ninvariants: hold\nleft on hosts: nothing\n"
    result = SUITES["chaos"].read(said, tmp_path)
    faults = [*result.faults]
    assert faults[0] == FaultKind(kind="server killed", seconds=[20.0, 30.0], not_recovered=1)
    newest = measured().model_copy(update={"faults": faults, "checks": [*result.checks]})
    text = page([Measured(suite="chaos", newest=newest)])
    assert "| server killed | 3 | 2 | 25.0 | 30.0 |" in text
    assert "| **all** | 4 | 3 | 20.0 | 30.0 |" in text
    assert "reboot" not in text
    assert "Afterwards: invariants: hold; left on hosts: nothing." in text


def test_rows_of_the_load_are_read_by_their_columns(tmp_path: Path) -> None:
    cells = ["512", "900", "1.10", "0.98", "0.1", "7.5", "20.0", "180", "40", "30", "0.40", "0.20"]
    row = "  ".join(cell.rjust(len(name)) for name, cell in zip(COLUMNS, cells, strict=True))
    figures = SUITES["load"].read("  ".join(COLUMNS) + f"\n{row}\n", tmp_path).figures
    assert [(one.value, one.less_is_better) for one in figures] == [
        (900.0, False),
        (1.1, True),
        (7.5, True),
    ]


def test_syncs_and_publications_are_read_from_json(tmp_path: Path) -> None:
    line = {"hosts": 3, "all_mb_s": 400.0, "fabric_all_mb_s": 900.0, "raw_all_mb_s": 1000.0}
    figures = SUITES["sync"].read(json.dumps(line) + "\n", tmp_path).figures
    assert [one.value for one in figures] == [400.0, 900.0, 1000.0]
    told = {"parameters": 7e8, "seconds": {"before": [1.0, 2.0, 9.0], "still": [0.1, 0.2, 0.3]}}
    figures = SUITES["publication"].read(json.dumps(told), tmp_path).figures
    assert [one.value for one in figures] == [0.2, 2.0]


def test_peers_are_told_by_contender_and_by_how_many_learned(tmp_path: Path) -> None:
    rows = [
        {"contender": "libra", "step_s": 1.0, "success_s": 60.0},
        {"contender": "libra", "step_s": 3.0, "success_s": None},
        {"contender": "trl", "step_s": 4.0, "success_s": None},
    ]
    (tmp_path / "peers.json").write_text(json.dumps({"peers": rows}))
    figures = SUITES["peers"].read("", tmp_path).figures
    assert [(one.what, one.value) for one in figures] == [
        ("libra: a step, mean of 2 seeds", 2.0),
        ("libra: until its success was 0.7, 1 of 2 seeds", 60.0),
        ("trl: a step, mean of 1 seeds", 4.0),
    ]


def test_laws_are_told_by_what_they_are_off_and_regret_by_what_is_reached(tmp_path: Path) -> None:
    rows = [{"law": 9.0, "counted": 10.0}, {"law": 12.0, "counted": 10.0}]
    figures = SUITES["memory"].read(json.dumps(rows), tmp_path).figures
    assert [round(one.value, 6) for one in figures] == [15.0, 20.0]
    row = {"trace": "mint", "variant": "1,4", "start": "half", "regret": 0.04}
    (figure,) = SUITES["regret"].read(json.dumps({"regret": [row]}), tmp_path).figures
    assert (figure.value, figure.less_is_better) == (96.0, False)
    assert figure.what == "mint, 1,4: from the half start"


def test_a_command_that_fails_says_what_it_said() -> None:
    suite = Suite(
        "none", "None", "python -m tests.no_such_module", lambda stdout, out: Result(), ""
    )
    with pytest.raises(EntryFailed, match="No module named"):
        measure(suite, lambda text: None)


# -- the command -----------------------------------------------------------------------------------


def test_one_that_fails_is_told_and_what_is_fresh_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def invented(suite: Suite, say: object) -> Result:
        asked.append(suite.name)
        if suite.name == "load":
            raise EntryFailed("it needs root")
        return Result([Figure(what="plan", value=1.0, unit="s")])

    monkeypatch.setattr(command, "measure", invented)
    monkeypatch.setattr(made_page, "commit", lambda: "abc")
    monkeypatch.setattr(made_page, "SETTLE_S", 0.0)
    monkeypatch.setattr(command, "machine", lambda: MACHINE)
    monkeypatch.setattr(MadePage, "draw", lambda self: None)
    monkeypatch.setattr(kept, "path_of", lambda suite, folder=None: tmp_path / f"{suite}.json")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "load", "decisions"])
    for _ in range(2):
        with pytest.raises(SystemExit, match="failed: load"):
            command.BENCHMARKS.main()
    assert asked == ["decisions", "load", "load"]
    assert "load: it needs root" in capsys.readouterr().out
