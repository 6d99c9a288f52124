"""``report.html`` is one small file that needs nothing else, for any run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from libra_cli.core import records as r
from libra_cli.edge.journal import Journal
from libra_cli.edge.report import write_report
from libra_cli.errors import StateError
from tests import sample_run

_NOW = sample_run.START + 1000.0
_LIMIT_BYTES = 300_000
_VOID = ("meta", "link", "br", "img", "input", "hr")


class Page(HTMLParser):
    """Checks that every tag is closed in order; collects what the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def page_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = sample_run.write(tmp_path_factory.mktemp("runs") / "run")
    path = write_report(run_dir, now=_NOW)
    assert sorted(each.name for each in run_dir.iterdir()) == ["libra.db", "libra.lock", path.name]
    return path.read_text(encoding="utf-8")


def test_it_opens_offline(page_text: str) -> None:
    page = Page(page_text)
    assert all(load.startswith("#") for load in page.loads), page.loads
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags)
    assert re.findall(r"(?:https?:)?//[\w.]+", page_text) == []
    assert re.findall(r"@import|url\((?!#)", page_text) == []


def test_it_is_small(page_text: str) -> None:
    assert len(page_text.encode()) < _LIMIT_BYTES


def test_every_curve_that_was_asked_for_is_there(page_text: str) -> None:
    page = Page(page_text)
    titles = ("Reward", "Trajectory length", "Speed", "Staleness", "Log-probability gap")
    for title in (*titles, "Weight sync", "Time of a step", "Slots"):
        assert f"<b>{title}</b>" in page_text
    assert page.tags.count("svg") == 8
    assert "tolerance 0.001" in page.words
    assert "local/1" in page.words


def test_its_colours_follow_the_reader(page_text: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", page_text, flags=re.DOTALL))
    assert "prefers-color-scheme: dark" in page_text
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) == set(), "a colour the page cannot change"
    used = set(re.findall(r"var\(--(\w+)\)", page_text))
    assert used - {"key"} <= set(re.findall(r"--(\w+):", page_text))


def test_the_ids_of_one_drawing_do_not_reach_into_another(page_text: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page_text)
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page_text))
    assert references <= set(ids)


def test_making_it_again_gives_the_same_file(tmp_path: Path) -> None:
    run_dir = sample_run.write(tmp_path / "run", steps=12)
    first = write_report(run_dir, now=_NOW).read_text(encoding="utf-8")
    assert write_report(run_dir, now=_NOW).read_text(encoding="utf-8") == first


def test_a_long_run_gives_a_file_of_the_same_size(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record("finished", ended_at=_NOW + 9000, step=3000))
        for step in range(1, 3001):
            at = sample_run.START + 3.0 * step
            reward, gap = (step * 7919 % 1000) / 1000, 1e-5 * (1 + step % 9)
            journal.save(sample_run.step_record(step, at, reward=reward, logprob_gap=gap))
            for slot in ("a/0", "a/1"):
                times = (at, at + 0.2 + step % 5 / 10, at + 1.0)
                journal.save(r.SyncRecord(slot, 1, step, 0, *times, 0.1, 0.1, 9, 1e-6, True, ""))
                journal.save(
                    sample_run.slot_record(slot, "rollout", ("serving", "joining")[step % 2], at)
                )
    assert write_report(tmp_path, now=_NOW).stat().st_size < _LIMIT_BYTES


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_with_hardly_a_step_still_has_a_report(tmp_path: Path, steps: int) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record("failed", ended_at=_NOW, error="the host went away"))
        for step in range(1, steps + 1):
            journal.save(sample_run.step_record(step, sample_run.START + step, logprob_gap=None))
    page = Page(write_report(tmp_path, now=_NOW).read_text(encoding="utf-8"))
    assert "the host went away" in page.words
    assert "None" not in page.words
    assert "nan" not in page.words


def test_what_comes_from_outside_is_text_and_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    with Journal(tmp_path) as journal:
        run = sample_run.run_record("failed", ended_at=_NOW, error=evil)
        journal.save(replace(run, id=f"x{evil}", recipe=evil))
        journal.save(sample_run.slot_record(evil, "rollout", "failed", _NOW - 9, detail=evil))
    assert "script" not in Page(write_report(tmp_path, now=_NOW).read_text(encoding="utf-8")).tags


def test_no_room_for_the_file_is_an_error_a_user_can_act_on(tmp_path: Path) -> None:
    sample_run.write(tmp_path, steps=2)
    (tmp_path / ".report.html.tmp").mkdir()
    with pytest.raises(StateError, match="cannot write"):
        write_report(tmp_path, now=_NOW)


def test_the_views_start_without_the_drawing_library() -> None:
    script = (
        "import sys; import libra_cli.edge.report, libra_cli.edge.progress;"
        "sys.exit(sorted({'matplotlib', 'jinja2', 'numpy'} & set(sys.modules)) or None)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=20, check=False)
    assert done.returncode == 0
