"""``libra bench routing``: who knows how much work is left, on tasks that nobody had seen."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from libra_cli.bench.routing import OURS, RULES, RoutingRow, bounds_of, routing
from libra_cli.cli.main import app
from libra_cli.core.types import ToolOutcome
from libra_cli.sim.traces import RecordedEpisode, Trace, Turn


def trajectory(task: int, *, failed: bool, generated: int = 50) -> RecordedEpisode:
    """After its first return, by what that was: nothing more than 10 tokens, or 2,000."""
    outcome = ToolOutcome.ERROR if failed else ToolOutcome.OK
    first = Turn(generated, 100, "run", outcome, 1.0)
    rest = Turn(2_000 if failed else 10, 0, "", None, 0.0)
    return RecordedEpisode(f"task {task}", 200, (first, rest), 0.0)


def trace(*, telling: bool = True) -> Trace:
    """Half of the returns are errors, which tell what is left or nothing."""
    random = Random(1)
    episodes = []
    for task in range(60):
        failed = random.random() < 0.5
        told = trajectory(task, failed=failed)
        if not telling:
            lied = trajectory(task, failed=random.random() < 0.5).turns[0]
            told = RecordedEpisode(told.task, told.prompt, (lied, told.turns[1]), 0.0)
        episodes += [told] * 2
    return Trace("made up", tuple(episodes))


def by_rule(rows: list[RoutingRow]) -> dict[str, RoutingRow]:
    return {row.rule: row for row in rows}


def test_outcomes_that_tell_what_is_left_are_used_by_the_causal_tree_alone() -> None:
    rows = by_rule(routing([trace()], 1, lambda _: None))
    assert rows.keys() == RULES.keys()
    assert rows[OURS].right == rows[OURS].recall == 1.0
    assert rows[OURS].right > rows["published tree"].right + 0.2
    assert rows[OURS].right > rows["turn index"].right + 0.2


def test_a_heavy_tail_pulls_mean_and_p90_up_together_and_not_the_likeliest_bucket() -> None:
    """Of five errors one leaves 20,000 tokens and the others 300, and every success 10."""
    episodes = []
    for task in range(100):
        failed = task % 2 == 0
        first = trajectory(task, failed=failed).turns[0]
        left = (20_000 if task % 10 == 0 else 300) if failed else 10
        last = Turn(left, 0, "", None, 0.0)
        episodes.append(RecordedEpisode(f"task {task}", 200, (first, last), 0.0))
    rows = by_rule(routing([Trace("made up", tuple(episodes))], 1, lambda _: None))
    assert (rows[OURS].right, rows["its likeliest"].right) == (0.5, 0.9)


def test_what_always_says_the_same_is_right_as_often_as_that_is_true_and_moves_nothing() -> None:
    row = by_rule(routing([trace()], 1, lambda _: None))["always the shortest"]
    assert (row.recall, row.moved) == (0.5, 0.0)
    assert 0.2 < row.right < 0.8


def test_outcomes_that_tell_nothing_make_nobody_right() -> None:
    rows = routing([trace(telling=False)], 3, lambda _: None)
    assert all(row.right < 0.8 for row in rows if row.rule == OURS)


def test_contexts_count_as_moved_once_each_time_they_change_their_bucket() -> None:
    row = by_rule(routing([trace()], 1, lambda _: None))[OURS]
    assert row.moved == pytest.approx(
        1 - by_rule(routing([trace()], 1, lambda _: None))["always the shortest"].right
    )


def test_every_seed_holds_out_other_tasks_and_the_same_seed_the_same() -> None:
    one, again = (routing([trace()], 3, lambda _: None) for _ in range(2))
    assert one == again
    assert len({row.right for row in one if row.rule == "always the shortest"}) > 1


def test_the_bounds_keep_their_distance_where_lengths_do_not() -> None:
    short, long = bounds_of([trajectory(0, failed=False)] * 3)
    assert (short, long) == pytest.approx((66.0, 82.5))


def test_the_command_says_how_often_each_is_right(tmp_path: Path) -> None:
    file, told = tmp_path / "two.jsonl", tmp_path / "told.json"
    turn = {"prompt_tokens": 100, "gen_tokens": 40, "tool": "search", "tool_ok": True}
    lines = [{"task": f"task {at % 6}", "turns": [turn] * (1 + at % 5)} for at in range(30)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["bench", "routing", "--trace", str(file), "--seeds", "2", "--json", str(told)]
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert all(f" {name} " in done.output for name in RULES)
    rows = json.loads(told.read_text())["routing"]
    assert len(rows) == 2 * len(RULES)
    assert all(0 <= row["right"] <= 1 and 0 <= row["moved"] <= 1 for row in rows)
