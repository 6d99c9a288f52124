"""The trajectories in a report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from libra_cli.report.html.run_report import report_page
from libra_cli.report.trajectories.sample import (
    LONGEST_MESSAGE,
    by_turn_count,
    sample,
    shortened,
)
from libra_cli.runtime.store.reader import Reader
from tests.played import write_played
from tests.sample_run import START


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_played(tmp_path_factory.mktemp("report") / "quickstart-1")


@pytest.fixture(scope="module")
def page(run_dir: Path) -> str:
    return report_page(run_dir, now=START + 2000)


def test_a_step_has_its_best_its_worst_its_longest_and_any_one(run_dir: Path) -> None:
    with Reader(run_dir) as reader:
        newest = [one for one in sample(reader) if one.step == 41]
    names = {str(one.played.id): set(one.names) for one in newest}
    assert names["9000.1.0"] >= {"best", "longest"}
    assert names["9000.0.0"] >= {"worst"}
    assert sum("any" in called for called in names.values()) == 1


def test_what_a_tool_wrote_is_text_on_the_page(page: str) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert not {"\x1b", "\x07", "\u202e"} & set(page)


def test_the_page_may_load_nothing(page: str) -> None:
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page)


def test_every_choice_of_a_filter_has_its_rule(page: str) -> None:
    choices = set(re.findall(r'<input type="radio" name="\w+" id="(\w+-[1-9]\d*)"', page))
    rules = set(re.findall(r"main:has\(#([\w-]+):checked\)", page))
    assert choices == rules
    tags = set(re.findall(r'<details class="trajectory ([^"]*)"', page))
    assert {tag for one in tags for tag in one.split()} == choices


def test_a_long_message_has_its_middle_left_out() -> None:
    told = shortened("a" * LONGEST_MESSAGE + "b" * LONGEST_MESSAGE)
    assert f"[{LONGEST_MESSAGE:,} characters left out]" in told
    assert len(told) < LONGEST_MESSAGE + 100
    assert shortened("a\u202eb") == "a\\u202eb"


def test_rewards_are_told_by_turns(run_dir: Path) -> None:
    with Reader(run_dir) as reader:
        told = by_turn_count(reader, reader.steps()[-1:])
    assert told == [{"turns": 2, "trajectories": 3, "reward": pytest.approx(2 / 3)}]
