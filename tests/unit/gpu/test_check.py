"""``make gpu-check`` without its checks: what counts as wrong, what is kept, what is sent."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import check, report
from tests.gpu.check import Record
from tests.gpu.expected import BY_NAME, CHECKS, Check, kind_of

RIGHT = {"whole_turns": True, "tokens_per_s": 9000.0}
MACHINE = {"gpus": ["NVIDIA H100 80GB HBM3, 580.95.05, 81559"], "torch": "2.13.0"}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    made = Record(tmp_path / "gpu-check")
    made.begin(MACHINE, again=False)
    return made


def result(name: str, **changes: object) -> dict[str, object]:
    made = {"check": name, "verdict": "ok", "took_s": 1.0, "measured": {}, "problems": []}
    return {**made, "error": "", **changes}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA B200", "other"),
        ("", "cpu"),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, kind: str):
    assert kind_of(name) == kind


def test_a_number_out_of_its_range_is_to_be_looked_at_and_a_wrong_one_fails():
    speed = BY_NAME["speed"]
    assert speed.problems(RIGHT, "H100") == ([], [])
    slow = {**RIGHT, "tokens_per_s": 2000.0}
    assert speed.problems(slow, "H100") == ([], ["tokens_per_s is 2000, not 8000 to 15000"])
    assert speed.problems(slow, "other") == speed.problems(slow, "cpu") == ([], [])
    assert speed.problems({**RIGHT, "whole_turns": False}, "H100")[0] == ["whole_turns is 0, not 1"]
    assert speed.problems({"whole_turns": True}, "H100")[0] == ["tokens_per_s is missing"]
    gaps = {"prompt_gap": float("nan"), "trainer_gap": 0.01, "gap_ratio": 1.0}
    assert BY_NAME["decode"].problems(gaps, "A100")[0] == ["prompt_gap is nan, not 0 to 0.2"]


def test_what_only_a_gpu_has_is_not_asked_of_a_cpu():
    measured = {"works": True, "shm_gib": 8.0}
    assert BY_NAME["machine"].problems(measured, "cpu") == ([], [])
    failed, _ = BY_NAME["machine"].problems(measured, "H100")
    assert failed == ["driver is missing", "triton_s is missing, not 0 to 120"]


def test_a_record_goes_on_where_it_ended_on_the_same_machine_only(record: Record):
    record.add(result("machine", verdict="failed"))
    record.add(result("machine"))
    record.add(result("kernels"))
    record.begin(MACHINE, again=False)
    assert [(one["check"], one["verdict"]) for one in record.results()] == [
        ("machine", "ok"),
        ("kernels", "ok"),
    ]
    with pytest.raises(ValueError, match="another machine or other versions; next: --again"):
        record.begin({**MACHINE, "torch": "2.14.0"}, again=False)
    record.begin({**MACHINE, "torch": "2.14.0"}, again=True)
    assert not record.results()


def test_a_process_that_dies_costs_its_check_and_the_next_one_is_made(
    record: Record, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.executable", "false")
    left = ["versions", "decode"]
    made = [(one.name, told["verdict"]) for one, told in check._checks(record, 0, left)]
    assert made == [("versions", "failed"), ("decode", "failed")]
    assert [one["error"].split(";")[0] for one in record.results()] == [
        "its process ended with 1"
    ] * 2


def test_a_server_that_does_not_start_is_tried_once_and_what_needs_it_is_left(
    record: Record, monkeypatch: pytest.MonkeyPatch
):
    def process(group: Sequence[Check], *_: object) -> Iterator[tuple[Check, dict[str, Any]]]:
        error = "NoServer: it has no GPU" if group[0].part == "server" else "ValueError: no"
        told = result(group[0].name, verdict="failed", error=error)
        record.add(told)
        yield group[0], told

    monkeypatch.setattr(check, "_in_a_process", process)
    wanted = ["versions", "decode", "speed", "offload", "run"]
    assert [one.name for one, _ in check._checks(record, 0, wanted)] == [
        "versions",
        "offload",
        "run",
    ]
    assert {"decode", "speed"} <= {one.name for one in check._left(record, 0)}


def test_what_is_sent_names_neither_host_nor_home(record: Record):
    host, home = socket.gethostname(), str(Path.home())
    record.add(result("run", verdict="failed", error=f"{host}: {home}/x is away"))
    assert json.loads(record.file.read_text())["error"] == "<host>: ~/x is away"
    text = report.text_of(report.whole(MACHINE, record.results(), "H100"))
    assert "torch 2.13.0" in text
    assert BY_NAME["run"].otherwise in " ".join(text.split())
    assert all(one.name in text for one in CHECKS)


def test_checks_by_name_leave_their_files_to_those_that_are_left(record: Record):
    record.add(result("trainer"))
    assert [one.name for one in check._left(record, 1, ["trainer", "start"])] == [
        "trainer",
        "start",
    ]
    left = [one.name for one in check._left(record, 1)]
    assert "trainer" not in left
    assert "start" in left
    assert "two_gpus" not in left
    for one in CHECKS:
        record.add(result(one.name))
    assert check._left(record, 1) == []
