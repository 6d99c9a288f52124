"""What a rank tells in its host's file is what the controller reads."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from libra_cli.core.progress.phases import LONGEST_S, PHASES, phase_limit_s
from libra_cli.node import heartbeat
from libra_cli.node.heartbeat import Heartbeat, beside
from libra_cli.runtime.trainer import rank_watch
from libra_cli.runtime.trainer.rank_watch import RankRecord, read_records
from tests.package_graph import modules


def test_ranks_of_a_host_share_a_file_and_the_controller_reads_all_of_this_incarnation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = beside(str(tmp_path / "trainer.json"))
    hearts = []
    for place in (2, 0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(place))
        hearts.append(Heartbeat(path, rank=4 + place, incarnation=3 if place else 2))
    hearts[0].enter("updating the weights")
    assert list(read_records(path.read_bytes(), 3)) == [
        RankRecord(5, 3, 0, 0, "starting"),
        RankRecord(6, 3, 0, 1, "updating the weights"),
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_rank_beats_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    path = tmp_path / "trainer.progress"
    Heartbeat(path).start()
    give_up = time.monotonic() + 10.0
    while next(read_records(path.read_bytes(), 0)).beat < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    assert next(read_records(path.read_bytes(), 0)).beat >= 3


def test_a_rank_whose_host_has_no_room_for_the_file_goes_on_untold(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path / "no" / "such" / "directory")
    heart.enter("loading the model")


def test_both_sides_know_the_same_size_of_a_record_and_long_phases_fit(tmp_path: Path) -> None:
    assert heartbeat.RECORD_BYTES == rank_watch.RECORD_BYTES
    path = tmp_path / "trainer.progress"
    Heartbeat(path, rank=10**6, incarnation=10**6).enter("é" * 1000)
    assert path.stat().st_size == heartbeat.RECORD_BYTES


@pytest.mark.parametrize("data", [b"", b"\0" * 600, b"{}", b"[1]", b'{"rank": 1}', b"\xff" * 300])
def test_a_file_that_is_damaged_tells_of_no_rank(data: bytes) -> None:
    assert list(read_records(data, 0)) == []


def test_every_phase_that_a_rank_enters_has_a_deadline() -> None:
    entered = {
        match[1]
        for module in modules()
        if module.path.parts[0] == "node"
        for match in re.finditer(r'enter\(f?"([^":]+)', module.text)
    }
    assert entered | {"starting"} == set(PHASES)
    assert phase_limit_s("computing gradients: micro-batch 2 of 7") == PHASES["computing gradients"]
    assert phase_limit_s("of a later version") == LONGEST_S
