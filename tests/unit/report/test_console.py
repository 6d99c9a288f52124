"""The views fit 80 columns, speak ASCII where they must, and log plainly where nobody watches."""

from __future__ import annotations

import io
import json
import math
import os
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from libra_cli.core import records as r
from libra_cli.report.status.summary import RunSummary, summary
from libra_cli.report.terminal.console import duration, final_view, slot_label, status_view
from libra_cli.report.terminal.plots import Plot, Portable, bar, sparkline
from libra_cli.report.terminal.progress import Progress, without_progress
from libra_cli.runtime.store.controller_process import process_started
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from tests import sample_run

_DEADLINE_S = 10.0


def drawn(view: RenderableType, *, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width, force_terminal=False).print(view)
    file.flush()
    return raw.getvalue().decode(encoding)


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def many_slots(count: int) -> list[r.SlotRecord]:
    return [
        sample_run.slot_record(
            f"gpu-{index // 8:02}.rack.example.org/{index % 8}",
            "rollout",
            "unreachable" if index == 3 else "serving",
            0.0,
            bucket="very-long-bucket",
            version=123456,
            verified=index != 5,
            running=1024,
            waiting=99999,
            busy_s=1.0,
            serving_s=2.0,
        )
        for index in range(count)
    ]


def live(
    run_dir: Path,
    until: float,
    extra: Iterable[r.Record] = (),
    life: Iterable[tuple[float, r.Record]] | None = None,
) -> RunSummary:
    """The sample run, cut off, as if this process were its controller."""
    started = process_started(os.getpid())
    with Journal(run_dir) as journal:
        for at, record in sample_run.records() if life is None else life:
            if at <= sample_run.START + until:
                if isinstance(record, r.RunRecord):
                    record = replace(
                        record, controller_pid=os.getpid(), controller_started=started or 0.0
                    )
                journal.save(record)
        for record in extra:
            journal.save(record)
    with Reader(run_dir) as reader:
        return summary(reader, now=sample_run.START + until)


@pytest.mark.parametrize("until", [0.0, 10.0, 35.0, 60.0, 135.0, 1000.0])
def test_status_fits_80_columns_at_every_moment_of_a_run(tmp_path: Path, until: float) -> None:
    value = live(tmp_path, until)
    for encoding in ("utf-8", "ascii"):
        text = drawn(status_view(value, now=sample_run.START + until), encoding=encoding)
        assert widest(text) <= 80
        assert "quickstart-1" in text


def test_status_shows_for_every_slot_what_it_does(tmp_path: Path) -> None:
    value = live(tmp_path, 150.0)
    text = drawn(status_view(value, now=sample_run.START + 150.0))
    (line,) = [line for line in text.splitlines() if "local/1" in line]
    words = line.split()
    assert words[:6] == ["local/1", "rollout", "serving", "short", "21", "✓"]
    assert any(word.endswith("%") for word in words)
    assert "the trainer waits for" in text


def test_status_shows_how_little_of_the_weights_travelled(tmp_path: Path) -> None:
    value = live(tmp_path, 150.0)
    text = drawn(status_view(value, now=sample_run.START + 150.0))
    assert re.search(r"pulled +\d+ of \d+ pulls sent only changes, all 7.1% of the bytes of", text)


def test_status_shows_what_the_rule_that_makes_batches_did(tmp_path: Path) -> None:
    numbers = {
        "tokens_over_bound": 123_456,
        "share_over_bound": 0.123,
        "token_staleness_mean": 1.5,
        "token_staleness_max": 12,
        "groups_closed": 1_234,
        "trajectories_left": 4_321,
        "trajectories_late": 4_320,
        "played_length": 20.0,
    }
    step = sample_run.step_record(1, sample_run.START + 9, batch_json=r.to_metrics_json(numbers))
    value = live(tmp_path, 5.0, [step])
    text = drawn(status_view(value, now=sample_run.START + 150.0))
    assert widest(text) <= 80
    assert "12.3% of tokens over the bound" in text
    assert "1,234 groups, 4,321 members left, 4,320 trained later" in text


def test_long_host_names_and_big_numbers_keep_the_table_whole(tmp_path: Path) -> None:
    value = live(tmp_path, 150.0, many_slots(48))
    text = drawn(status_view(value, now=sample_run.START + 150.0))
    assert widest(text) <= 80
    assert "unreachable" in text
    assert "123456 ✗" in text
    assert text.count("gpu-0") == 48


def test_status_shows_once_what_all_servers_run(tmp_path: Path) -> None:
    value = live(tmp_path, 150.0)
    text = drawn(status_view(value, now=sample_run.START + 150.0))
    assert text.count("runner V2, async scheduling, CUDA graphs full_and_piecewise") == 1
    assert {server.engine for server in value.servers} == {value.servers[0].engine}


def test_status_shows_the_queue_and_the_moves(tmp_path: Path) -> None:
    value = live(tmp_path, 150.0)
    text = drawn(status_view(value, now=sample_run.START + 150.0))
    assert re.search(r"queue +\d+ wait, \d+ of 96 seats taken", text)
    assert re.search(r"placement +[\d,]+ of [\d,]+ turns went on at another server \(1\d%\)", text)


def line_of(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return line.split()


def test_a_move_under_way_shows_its_phase_and_for_how_long(tmp_path: Path) -> None:
    until = sample_run.LEAVES_AT - sample_run.START + 3.4 + 2.2 + 5.0
    value = live(tmp_path, until, life=sample_run.moving())
    text = drawn(status_view(value, now=sample_run.START + until))
    assert line_of(text, "1 ") == [
        "1",
        "local/1",
        "rollout",
        "gradient",
        "start",
        "for",
        "5.0",
        "s",
        "11",
        "s",
    ]
    assert "plan 2 (planner): steps predicted 18% shorter, not observed yet" in text
    assert widest(text) <= 80


def test_moves_that_are_done_show_what_they_took_and_what_the_newest_plan_gains(
    tmp_path: Path,
) -> None:
    value = live(tmp_path, 1000.0, life=sample_run.moving())
    text = drawn(status_view(value, now=sample_run.START + 1000.0))
    assert line_of(text, "1 ") == ["1", "local/1", "rollout", "gradient", "done", "16", "s"]
    assert line_of(text, "2 ") == ["2", "local/1", "gradient", "rollout", "done", "13", "s"]
    assert "plan 3 (order): steps predicted 5% longer, observed unchanged" in text
    assert "plan 2 (" not in text


def test_the_newest_decision_is_told_in_a_few_lines(tmp_path: Path) -> None:
    value = live(tmp_path, 1000.0, life=sample_run.moving())
    text = drawn(status_view(value, now=sample_run.START + 1000.0))
    words = " ".join(text.split())
    assert "decision after step 14 (rollout waited for 30% of a step): plan 2" in words
    assert "4.2 s a step, 5.1 s before, likely 3.4 to 5.2 s" in words
    assert "came: 4.55 s over 5 steps" in words
    assert "binds rollout: 1 x TP 1: room in the KV cache; before, training arithmetic" in words
    assert "runner-up rollout 2 GPUs (2 x TP 1)" in words
    assert "its steps are 21.4% longer" in words
    assert "cost 9 s of the whole job, paid back in 10.0 steps, of 28 to count on" in words
    assert widest(text) <= 80


def test_a_decision_to_stay_says_why(tmp_path: Path) -> None:
    for until, outcome in ((70.0, "the costs are not known yet"), (77.0, "a gain of 4.1%")):
        value = live(tmp_path / str(until), until, life=sample_run.moving())
        words = " ".join(drawn(status_view(value, now=sample_run.START + until)).split())
        assert f"stay: {outcome}" in words
        assert ("predicted" in words) == (until > 75.0)
        assert "paid back" not in words


def test_a_move_that_failed_says_why(tmp_path: Path) -> None:
    why = "the gradient worker did not start; the slot serves again"
    at = sample_run.START + 100.0
    failed = r.MoveRecord(1, 2, "local/1", "rollout", "gradient", "failed", at, at + 9, "[]", why)
    text = drawn(status_view(live(tmp_path, 150.0, [failed]), now=sample_run.START + 150.0))
    assert line_of(text, "1 ") == ["1", "local/1", "rollout", "gradient", "failed", "9.0", "s"]
    assert f"✗ move 1 of local/1: {why}" in text


def test_moves_of_long_names_and_many_hours_fit_80_columns(tmp_path: Path) -> None:
    slot, phases = "gpu-07.rack.example.org/12", json.dumps([["drain", sample_run.START, None]])
    move = r.MoveRecord(
        1234, 99, slot, "rollout", "gradient", "drain", sample_run.START, None, phases, ""
    )
    plan = r.PlanRecord(99, 0.0, "[]", "[]", "[]", "[]", "planner", 1.0, 9.0, 5.0, 100.0, 0.1)
    begun = [(at, record) for at, record in sample_run.records() if at < sample_run.START + 150]
    value = live(tmp_path, 86_000.0, [move, plan], begun)
    text = drawn(status_view(value, now=sample_run.START + 86_000.0))
    assert widest(text) <= 80
    assert "drain" in text
    assert "23:53:20" in text
    assert "plan 99 (planner): steps predicted 800% longer, observed 100% shorter" in text


def test_a_first_plan_gains_nothing_and_says_nothing(tmp_path: Path) -> None:
    value = live(tmp_path, 150.0)
    assert "plan 1" not in drawn(status_view(value, now=sample_run.START + 150.0))


def test_buckets_with_long_names_and_big_numbers_fit_80_columns(tmp_path: Path) -> None:
    value = live(tmp_path, 150.0)
    big = replace(
        value.buckets[0],
        bucket="a-very-long-bucket-name",
        up_to_tokens=131_072,
        waiting=99_999,
        occupancy=1.0,
        turns=12_345_678,
        moved_in=1_234_567,
        moved_out=1_234_567,
    )
    text = drawn(status_view(replace(value, buckets=[big, big]), now=sample_run.START + 150.0))
    assert widest(text) <= 80
    assert text.count("12,345,678") == 2


def test_a_label_is_cut_in_the_host_and_never_in_the_index() -> None:
    assert slot_label("gpu-01/0") == "gpu-01/0"
    assert slot_label("gpu-01.rack.example.org/12") == "gpu-01.r…/12"


def test_what_went_wrong_is_the_last_thing_shown(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record("failed", ended_at=sample_run.START, error="no room"))
    with Reader(tmp_path) as reader:
        value = summary(reader, now=sample_run.START + 5)
    assert drawn(status_view(value, now=sample_run.START + 5)).rstrip().endswith("✗ no room")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_end_shows_the_reward_as_a_plot(tmp_path: Path, encoding: str) -> None:
    sample_run.write(tmp_path / "run")
    with Reader(tmp_path / "run") as reader:
        value, steps = summary(reader, now=sample_run.START + 999.0), reader.steps()
    report = tmp_path / "run" / "report.html"
    text = drawn(final_view(value, steps, report=report), encoding=encoding)
    assert widest(text) <= 80
    assert "report.html" in text.replace("\n", "").replace(" ", "")
    assert len(re.findall(r"[\u2801-\u28ff*]", text)) > 50
    assert "checkpoint" in text


def test_the_end_of_a_run_without_a_step_has_no_plot(tmp_path: Path) -> None:
    value = live(tmp_path, 10.0)
    assert "a dot a step" not in drawn(final_view(value, []))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.84, "0.8 s"),
        (42, "42 s"),
        (59.7, "1:00"),
        (252, "4:12"),
        (3723, "1:02:03"),
    ],
)
def test_durations_read_like_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 1.0], [0.0, 0.0], [math.nan] * 3, [1e-9, 1e9]])
def test_any_values_can_be_plotted(values: list[float]) -> None:
    assert widest(drawn(Plot(values, values), width=60)) <= 60
    assert len(sparkline(values, 5)) <= 5


def test_a_rising_line_rises_from_the_lower_left_to_the_upper_right() -> None:
    rows = drawn(Plot([0.0, 1.0], [0.0, 1.0], height=4)).splitlines()
    first, last = rows[0][8:].strip("\u2800 "), rows[3][8:].strip("\u2800 ")
    assert rows[0].index(first[0]) > rows[3].index(last[-1])


def test_bars_are_as_long_as_their_share() -> None:
    assert bar(0.5, 10) == "█████░░░░░"
    assert bar(7.0, 4) == "████"


def test_noise_does_not_fill_a_sparkline() -> None:
    assert set(sparkline([100.0, 100.2, 100.1])) <= set("▃▄▅")


def test_a_console_without_unicode_gets_letters_of_the_same_width() -> None:
    text = "✓ → ━━ █░ ⠋ – é"
    assert drawn(Portable(Text(text)), encoding="ascii").strip() == "+ > == #. * - ?"


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = sample_run.START

    def __call__(self) -> float:
        return self.now


def replayed(
    console: Console, until: float, life: Iterable[tuple[float, r.Record]] | None = None
) -> Progress:
    clock = Clock()
    progress = Progress(console, name="quickstart", clock=clock)
    for at, record in sample_run.records() if life is None else life:
        if at > sample_run.START + until:
            break
        clock.now = at
        progress.on(record)
    clock.now = sample_run.START + until
    return progress


def test_without_a_terminal_every_step_is_one_plain_line() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    with replayed(console, 1000.0) as progress:
        progress.note("stopping: 3 processes")
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert sum(" step " in line for line in lines) == 40
    assert re.fullmatch(r"\d\d:\d\d:\d\d  run quickstart-1: starting", lines[0])
    assert sum("slot local/1: server serving" in line for line in lines) == 2
    assert any("the server died (exit code -9)" in line for line in lines)
    assert lines[-1].endswith("stopping: 3 processes")
    assert len(lines) < 75


def test_why_a_run_failed_is_left_to_its_end_which_says_what_to_type_too() -> None:
    file = io.StringIO()
    with Progress(Console(file=file, width=80), name="x", clock=Clock()) as progress:
        progress.on(sample_run.run_record("failed", error="gpu-01: no route"))
    line = file.getvalue()
    assert line.rstrip().endswith(": failed")
    assert without_progress(f"{line}gpu-01: no route\n  next: ssh gpu-01\n").splitlines() == [
        "gpu-01: no route",
        "  next: ssh gpu-01",
    ]


def test_without_a_terminal_every_phase_of_a_move_is_one_plain_line() -> None:
    out = io.StringIO()
    replayed(Console(file=out, width=80), 1000.0, sample_run.moving())
    lines = [line.split("  ", 1)[1] for line in out.getvalue().splitlines()]
    moves = [line for line in lines if line.startswith("move 1:")]
    phases = ("drain", "stop", "start", "sync", "join", "done")
    assert moves == [f"move 1: slot local/1 from rollout to gradient: {phase}" for phase in phases]
    plans = [line for line in lines if line.startswith("plan")]
    assert plans[1] == "plan 2 (planner): training takes 1.6 times as long as rollout"
    assert len(plans) == 3, "what a plan gained does not make it another plan"


def test_while_a_slot_moves_its_phase_is_there_and_then_no_more() -> None:
    began = sample_run.LEAVES_AT - sample_run.START
    text = drawn(replayed(Console(file=io.StringIO()), began + 9.0, sample_run.moving()))
    assert re.search(r"move +local/1 from rollout to gradient: start for 3.4 s", text)
    assert widest(text) <= 80
    text = drawn(replayed(Console(file=io.StringIO()), began + 20.0, sample_run.moving()))
    assert "from rollout to gradient" not in text


def test_without_a_terminal_a_decision_is_one_plain_line_and_what_came_another() -> None:
    out = io.StringIO()
    replayed(Console(file=out, width=80), 1000.0, sample_run.moving())
    lines = [line.split("  ", 1)[1] for line in out.getvalue().splitlines()]
    stay = "5.1 s a step predicted"
    plan = "decision after step 14: plan 2, 4.2 s a step predicted"
    because = "(a gain of 4.1% is below 8%; training waited for 40% of a step)"
    assert [line for line in lines if line.startswith("decision")] == [
        "decision after step 2: stay (the costs are not known yet; 5 steps have passed)",
        f"decision after step 9: stay, {stay} {because}",
        f"decision after step 9: stay, {stay}, 5.3 s came {because}",
        f"{plan} (rollout waited for 30% of a step)",
        f"{plan}, 4.55 s came (rollout waited for 30% of a step)",
    ]


def test_a_running_run_shows_its_last_decisions_in_a_line_each_and_then_what_came() -> None:
    made = sample_run.LEAVES_AT - sample_run.START
    newest = r"decision +step 14: plan 2, 4.2 s a step predicted"
    for later, came, encoding in ((5.0, "", "utf-8"), (36.0, ", 4.55 s came", "ascii")):
        progress = replayed(Console(file=io.StringIO()), made + later, sample_run.moving())
        text = drawn(progress, encoding=encoding)
        assert widest(text) <= 80
        assert re.search(rf"{newest}{came} \(rollout[^\n]*\n +step 9: stay, 5.1 s", text)
        assert "5.3 s came" in text
        assert "step 2:" not in text, "only the last two"


def test_plain_lines_survive_an_encoding_without_the_letters() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    progress = Progress(Console(file=file, width=80), name="x", clock=Clock())
    progress.note("[bold]→ é")
    file.flush()
    assert file.buffer.getvalue().decode().endswith("  [bold]? ?\n")


def test_while_starting_every_part_says_what_it_does_and_for_how_long() -> None:
    text = drawn(replayed(Console(file=io.StringIO()), 31.0))
    assert widest(text) <= 80
    assert re.search(r"✓ +node local +connected, 2 cores, 23 GiB +0.8 s", text)
    assert re.search(r"✓ +model on local +done +3.1 s", text)
    assert re.search(r"✓ +slot local/0 +server serving version 0", text)
    assert re.search(r"… +slot local/1 +server starting +27 s", text)
    assert re.search(r"✓ +slot local/2 +trainer ready +14 s", text)
    assert "rollout waits for its servers" in text


def test_while_running_the_numbers_of_the_run_are_there() -> None:
    text = drawn(replayed(Console(file=io.StringIO()), 150.0))
    assert widest(text) <= 80
    for word in ("21 of 40", "left", "tokens/s", "staleness", "waiting", "first 0.64", "local/2"):
        assert word in text


def test_a_server_that_is_down_is_explained_below_the_table() -> None:
    began = next(
        at
        for at, rec in sample_run.records()
        if "died" in getattr(rec, "detail", "") and isinstance(rec, r.SlotRecord)
    )
    text = drawn(replayed(Console(file=io.StringIO()), began - sample_run.START + 0.1))
    assert "✗ slot local/1: server failed: the server died (exit code -9)" in text


def test_many_parts_are_counted_and_only_the_unready_named() -> None:
    clock = Clock()
    progress = Progress(Console(file=io.StringIO()), name="big", clock=clock)
    for slot in many_slots(48):
        progress.on(slot)
    text = drawn(progress)
    assert "47 of 48 ready" in text
    assert text.count("rack") == 1
    progress.on(sample_run.run_record())
    text = drawn(progress)
    assert widest(text) <= 80
    assert "and 36 more" in text


def test_on_a_terminal_one_live_area_is_drawn_and_removed_at_the_end() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    clock = Clock()
    with Progress(console, name="quickstart", clock=clock) as progress:
        for at, record in sample_run.records():
            clock.now = at
            progress.on(record)
        progress.note("a note that stays")
        deadline = time.monotonic() + _DEADLINE_S
        while "40 of 40" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    text = out.getvalue()
    assert "40 of 40" in text
    assert "a note that stays" in text
    assert "\x1b[?25h" in text, "the cursor must come back"


class Terminal(io.StringIO):
    """One that may go."""

    there = True

    def isatty(self) -> bool:
        return self.there


def test_once_its_terminal_has_gone_a_run_is_told_in_plain_lines() -> None:
    out = Terminal()
    console = Console(file=out, width=80)
    with Progress(console, name="quickstart", clock=Clock()) as progress:
        progress.on(sample_run.run_record())
        progress.note("seen")
        assert "seen" in out.getvalue()
        out.there = False
        before = len(out.getvalue())
        progress.on(sample_run.step_record(1, sample_run.START))
        progress.note("not seen")
    text = out.getvalue()[before:]
    assert [line.partition("  ")[2].split("  ")[0] for line in text.splitlines()] == [
        "step 1/40",
        "not seen",
    ]
    assert "\x1b" not in text
