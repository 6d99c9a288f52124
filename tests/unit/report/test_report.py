"""``report.html`` is one small file that needs nothing else, for any run."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from libra_cli.config.errors import StateError
from libra_cli.core import records as r
from libra_cli.report.html.run_report import write_report
from libra_cli.report.html.slot_rows import SHADES
from libra_cli.runtime.store.journal import Journal
from tests import sample_run
from tests.eyesight import EYES, seen

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
    names = sorted(each.name for each in run_dir.iterdir())
    assert names == ["libra.db", "libra.lock", path.name, "tokens.bin"]
    return path.read_text(encoding="utf-8")


def test_it_opens_offline(page_text: str) -> None:
    page = Page(page_text)
    assert all(load.startswith("#") for load in page.loads), page.loads
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags)
    assert re.findall(r"(?:https?:)?//[\w.]+", page_text) == []
    assert re.findall(r"@import|url\((?!#)", page_text) == []


def test_the_batches_have_charts_where_there_is_something_to_show(tmp_path: Path) -> None:
    numbers = {"share_over_bound": 0.1, "token_staleness_mean": 1.0, "token_staleness_max": 3}
    numbers |= {"groups_closed": 2, "trajectories_left": 3, "trajectories_late": 1}
    with Journal(tmp_path) as journal:
        for _, record in sample_run.records():
            if isinstance(record, r.StepRecord):
                batch = r.to_metrics_json(numbers | {"played_length": 30.0})
                record = replace(record, batch_json=batch)
            journal.save(record)
    page = write_report(tmp_path, now=sample_run.START + 1000).read_text(encoding="utf-8")
    assert "Over the staleness bound" in page
    assert "Length played and trained" in page
    assert "10.0% of tokens over the bound" in page


@pytest.mark.parametrize(
    ("first_s", "others_s", "told"), [(49.0, 1.0, True), (2.0, 1.0, False), (0.0, 0.0, False)]
)
def test_a_first_wait_that_would_hide_the_others_is_told_in_words(
    tmp_path: Path, first_s: float, others_s: float, told: bool
) -> None:
    with Journal(tmp_path) as journal:
        for _, record in sample_run.records():
            if isinstance(record, r.StepRecord):
                record = replace(record, waited_s=first_s if record.step == 1 else others_s)
            journal.save(record)
    page = write_report(tmp_path, now=_NOW).read_text(encoding="utf-8")
    assert ("seconds; 49 s before the first are not drawn" in page) is told
    assert ("are not drawn" in page) is told


def test_it_is_small(page_text: str) -> None:
    assert len(page_text.encode()) < _LIMIT_BYTES


def test_every_curve_that_was_asked_for_is_there(page_text: str) -> None:
    page = Page(page_text)
    titles = ("Reward", "Trajectory length", "Speed", "Staleness", "Log-probability gap")
    named = ("loss", "grad_norm", "entropy", "clip_fraction", "tis_mean", "request_queue_time_s")
    for title in (*titles, "Weight sync", "Time of a step", "Slots", *named):
        assert f"<b>{title}</b>" in page_text
    assert page.tags.count("svg") == 8 + len(named) + page_text.count('class="on-narrow"')
    assert page_text.count('class="on-narrow"') == page_text.count('class="on-wide"') == 1
    assert "tolerance" not in page.words
    assert "local/1" in page.words


@pytest.fixture(scope="module")
def moving_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = sample_run.write_moving(tmp_path_factory.mktemp("moving") / "run")
    return write_report(run_dir, now=_NOW).read_text(encoding="utf-8")


def told(text: str) -> str:
    """The words of a page, those of two cells apart."""
    return " ".join(re.sub("<[^>]*>", " ", text).split())


def test_plans_are_listed_with_what_they_change_and_gain(moving_text: str) -> None:
    words = told(moving_text)
    assert "2 1:18 planner local/1 rollout → gradient training takes 1.6 times" in words
    assert "18% shorter (5.1 → 4.2 s) 14% shorter (5.3 → 4.55 s)" in words
    assert "3 1:58 order local/1 gradient → rollout" in words
    assert "5% longer (4.4 → 4.6 s) unchanged (4.5 → 4.5 s)" in words


def test_decisions_are_listed_with_what_was_expected_and_what_came(moving_text: str) -> None:
    words = told(moving_text)
    assert "2 5 steps have passed stay the costs are not known yet –" in words
    assert "9 training waited for 40% of a step stay : rollout 2 GPUs" in words.replace(
        "stay:", "stay :"
    )
    assert "5.1 s (4.6 to 5.7; errors of kept plans in the simulator) 5.3 s – –" in words
    assert "KV cache rollout: 1 x TP 1: room in the KV cache" in words
    assert "4.2 s (3.4 to 5.2; errors of moves in the simulator) 4.55 s 9 s 10 steps" in words


def test_what_was_predicted_is_drawn_under_the_steps_that_came(moving_text: str) -> None:
    assert "Predicted and observed steps" in moving_text
    drawing = moving_text.split("Predicted and observed steps")[1].split("</svg>")[0]
    assert drawing.count('opacity="0.22"') == 2


def test_moves_are_listed_with_the_seconds_of_their_phases(moving_text: str) -> None:
    words = told(moving_text)
    assert "after drain stop start sync verify join in all" in words
    assert "1 2 local/1 rollout gradient done 1:18 3.4 s 2.2 s 8.6 s 1.1 s – 0.9 s 16 s" in words
    assert "2 3 local/1 gradient rollout done 1:58 – 1.3 s 9.8 s 1.4 s 0.6 s 0.2 s 13 s" in words


def test_another_plan_is_a_numbered_line_through_the_slots(
    moving_text: str, page_text: str
) -> None:
    drawing = re.findall(r"<svg.*?</svg>", moving_text, flags=re.DOTALL)[-1]
    assert [text for text in re.findall(r"<text[^>]*>([^<]*)", drawing) if len(text) == 1] == [
        "2",
        "3",
    ]
    assert "another plan" in moving_text
    assert "another plan" not in page_text
    assert "<h2>Plans</h2>" not in page_text, "one that never changed is told by the recipe"


def test_the_legend_names_the_states_that_are_drawn_and_no_others(
    moving_text: str, page_text: str
) -> None:
    assert "training (gradient worker)" in moving_text
    assert "training (gradient worker)" not in page_text
    assert "</i>draining" in moving_text
    assert "</i>draining" not in page_text


def test_a_run_of_many_moves_shows_the_newest(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record("finished", ended_at=_NOW))
        for number in range(1, 501):
            at = sample_run.START + number
            phases = f'[["drain", {at}, {at + 0.5}]]'
            words = ("rollout", "gradient", "done", at, at + 0.5, phases, "")
            journal.save(r.MoveRecord(number, number, "a/0", *words))
            journal.save(r.PlanRecord(number, at, "[]", "[]", f'["why {number}"]'))
            state = ("draining", "serving")[number % 2]
            journal.save(sample_run.slot_record("a/0", "rollout", state, at))
    text = write_report(tmp_path, now=_NOW).read_text(encoding="utf-8")
    assert text.count("The newest 40 of 500.") == 2
    assert "why 500" in text
    assert "why 460" not in text
    assert len(text.encode()) < _LIMIT_BYTES


def test_its_colours_follow_the_reader(page_text: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", page_text, flags=re.DOTALL))
    assert "prefers-color-scheme: dark" in page_text
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) == set(), "a colour the page cannot change"
    used = set(re.findall(r"var\(--(\w+)\)", page_text))
    light, dark = palettes(page_text)
    assert used - {"key"} <= light.keys()
    assert light.keys() == dark.keys()


def palettes(page_text: str) -> tuple[dict[str, str], dict[str, str]]:
    """The colours of the light page and of the dark one."""
    light, dark = re.findall(r":root \{(.*?)\}", page_text, flags=re.DOTALL)
    pattern = r"--(\w+): (#[0-9a-f]{6})"
    return dict(re.findall(pattern, light)), dict(re.findall(pattern, dark))


@pytest.mark.parametrize("page", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", EYES)
def test_the_states_of_a_slot_can_be_told_apart(page_text: str, page: int, eyes: str) -> None:
    colours = palettes(page_text)[page]
    shown = {name: seen(colours[name], eyes) for name in (*SHADES, "card")}
    for one, other in itertools.combinations(shown, 2):
        if {one, other} != {"idle", "card"}:
            assert math.dist(shown[one], shown[other]) > 25, (one, other)


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
        journal.save(sample_run.run_record("finished", ended_at=_NOW + 3000, step=1000))
        for step in range(1, 1001):
            at = sample_run.START + 3.0 * step
            reward, gap = (step * 7919 % 1000) / 1000, 1e-5 * (1 + step % 9)
            journal.save(sample_run.step_record(step, at, reward=reward, logprob_gap=gap))
            for slot in ("a/0", "a/1"):
                times = (at, at + 0.2 + step % 5 / 10, at + 1.0)
                journal.save(
                    r.SyncRecord(slot, 1, step, 0, *times, 0.1, 0.1, 9, 4, "delta", 1e-6, True, "")
                )
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


def test_the_views_start_without_what_only_pages_need() -> None:
    script = (
        "import sys; import libra_cli.report.html.run_report, libra_cli.report.terminal.progress;"
        "sys.exit(sorted({'jinja2', 'numpy'} & set(sys.modules)) or None)"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=20, check=False)
    assert done.returncode == 0
