"""What changes over a run is a pure function of the draw and of the place in the run."""

from __future__ import annotations

from itertools import islice
from statistics import fmean

import pytest

from libra_cli.bench.config import BenchError, parse_drift
from libra_cli.sim.drift import NO_DRIFT, Drift, factor_at
from libra_cli.sim.traces import RecordedEpisode, Trace, Turn


def episode(task: str = "t", turns: int = 4, tool_s: float = 2.0) -> RecordedEpisode:
    played = tuple(Turn(10 + at, 5, f"tool-{at}", None, tool_s) for at in range(turns))
    return RecordedEpisode(task, 100, played, 1.0)


TRACE = Trace("some", tuple(episode(f"t{number}") for number in range(8)))
OTHER = Trace("other", (episode("other"),))


def drawn(drift: Drift, trace: Trace = TRACE, number: int = 8) -> list[RecordedEpisode]:
    groups = drift.groups(trace, "run/0", size=1, number=number)
    return [group[0] for group in islice(groups, number + 1)]


def test_without_a_drift_what_is_drawn_is_what_was_recorded() -> None:
    assert all(one in TRACE.episodes for one in drawn(NO_DRIFT))


def test_generated_tokens_grow_from_the_first_factor_to_the_last() -> None:
    played = drawn(parse_drift("1,4"))
    generated = [one.generated for one in played]
    assert generated == sorted(generated)
    assert (generated[0], generated[-1]) == (episode().generated, 4 * episode().generated)


def test_a_drift_of_tools_changes_their_times_and_nothing_else() -> None:
    first, *_, last = drawn(parse_drift("tools:1,20"))
    assert [turn.tool_s for turn in first.turns] == [2.0] * 4
    assert [turn.tool_s for turn in last.turns] == [40.0] * 4
    assert (last.generated, last.context) == (first.generated, first.context)


def test_tool_times_that_were_not_recorded_are_drawn_with_a_heavy_tail() -> None:
    flat = Trace("flat", TRACE.episodes, ("tool times",))
    times = sorted(
        turn.tool_s for one in drawn(parse_drift("tools:1,1"), flat, 800) for turn in one.turns
    )
    assert times[len(times) // 2] == pytest.approx(1.0, rel=0.2)
    assert fmean(times) > 2
    assert times[-1] > 50
    assert drawn(parse_drift("tools:1,1"), flat) == drawn(parse_drift("tools:1,1"), flat)


def test_a_drift_of_turns_repeats_those_before_the_last() -> None:
    last = drawn(parse_drift("turns:1,2"))[-1]
    names = [turn.tool for turn in last.turns]
    assert names == ["tool-0", "tool-1", "tool-2"] * 2 + ["tool-0", "tool-3"]
    assert len(episode(turns=1).repeated(3.0).turns) == 1
    assert [turn.tool for turn in episode().repeated(0.5).turns] == ["tool-0", "tool-3"]


def test_a_drift_of_contexts_changes_what_is_read_and_not_what_is_generated() -> None:
    first, *_, last = drawn(parse_drift("contexts:1,4"))
    assert (last.prompt, last.turns[0].observation) == (400, 20)
    assert (last.generated, first.context) == (first.generated, episode().context)


def test_a_share_of_the_groups_is_filtered_and_the_longer_tasks_are_left() -> None:
    lengths = Trace("lengths", tuple(episode(f"t{number}", number) for number in range(2, 12)))
    groups = islice(parse_drift("filtered:0/0.5").groups(lengths, "run", size=4, number=80), 200)
    played = [(len({one.reward for one in group}) > 1, group[0].generated) for group in groups]
    kept = [number for number, (signal, _) in enumerate(played) if signal]
    half = kept[40]  # from here on the second half of those that are trained
    assert all(signal for signal, _ in played[:half])
    assert fmean(signal for signal, _ in played[half:]) == pytest.approx(0.5, abs=0.15)
    left_out = {generated for signal, generated in played[half:] if not signal}
    assert max(left_out) < min(generated for signal, generated in played[half:] if signal)


def test_a_sudden_drift_holds_each_factor_for_an_equal_part() -> None:
    played = drawn(parse_drift("1/4/1/2"))
    factors = [round(one.generated / episode().generated) for one in played]
    assert factors == [1, 1, 4, 4, 1, 1, 2, 2, 2]


def test_a_change_of_task_comes_at_half_the_run() -> None:
    tasks = [one.task for one in drawn(Drift("task", task=OTHER))]
    assert "other" not in tasks[:4]
    assert set(tasks[4:]) == {"other"}


def test_factors_are_evenly_spaced_and_linear_in_between() -> None:
    assert [factor_at((1.0, 3.0, 1.0), place) for place in (0, 0.25, 0.5, 0.75, 1, 2)] == [
        1.0,
        2.0,
        3.0,
        2.0,
        1.0,
        1.0,
    ]
    assert factor_at((), 0.5) == 1.0


def test_a_drift_is_told_in_words() -> None:
    shown = [str(parse_drift(text)) for text in ("none", "4", "1,4,1", "tools:1,20", "task:mint")]
    shown += [str(parse_drift(text)) for text in ("turns:1/3", "filtered:0.5", "contexts:4/1")]
    assert shown == [
        "no drift",
        "drift x1 x4",
        "drift x1 x4 x1",
        "drift tools x1 x20",
        "drift task mint",
        "drift turns x1 / x3",
        "drift filtered 0% 50%",
        "drift contexts x4 / x1",
    ]


def test_a_drift_of_what_does_not_change_is_refused() -> None:
    with pytest.raises(BenchError, match="did you mean 'tools'"):
        parse_drift("tool:1,20")
    with pytest.raises(BenchError, match="shares of the groups"):
        parse_drift("filtered:0,1")
    with pytest.raises(BenchError, match="factors above zero"):
        parse_drift("tools:1/4,2")
