"""Traces are read line by line: what cannot be used is left out and told, the rest is played."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from libra_cli.bench.conditions import Conditions
from libra_cli.bench.config import ExperimentConfig
from libra_cli.core.workload import TrajectorySample
from libra_cli.sim.traces import RecordedEpisode, TraceError, Turn, load_trace


def line(task: str = "a", **call: Any) -> str:
    turn = {"prompt_tokens": 10, "gen_tokens": 5, "tool": "ls", "tool_ok": True}
    turn |= {"tool_latency_s": 0.5} | call
    return json.dumps({"source": "s", "task": task, "reward": 1.0, "turns": [turn]})


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_whole_trace_has_nothing_to_note(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, line(), "", line("b")))
    assert [episode.task for episode in trace.episodes] == ["s/a", "s/b"]
    assert trace.notes == ()


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "list indices"),
        ('{"task": "a"}', "lacks 'turns'"),
        ('{"task": "a", "turns": []}', "has no turns"),
        (line(gen_tokens=-3), "negative count"),
        (line(gen_tokens="many"), "invalid literal"),
        (line(prompt_tokens=float("inf")), "infinity"),
        (line(tool_latency_s=float("nan")), "no number"),
    ],
)
def test_an_unusable_line_is_left_out_and_told_with_its_place(
    tmp_path: Path, broken: str, why: str
) -> None:
    path = written(tmp_path, line(), broken, line("b"))
    trace = load_trace(path)
    assert len(trace.episodes) == 2
    (note,) = trace.notes
    assert note.startswith("mine: 1 of 3 lines left out: ")
    assert f"{path}:2: " in note
    assert why in note


def test_only_the_first_reasons_are_told_and_all_are_counted(tmp_path: Path) -> None:
    (note,) = load_trace(written(tmp_path, line(), *["{"] * 7)).notes
    assert "7 of 8 lines" in note
    assert note.count("is not JSON") == 3
    assert note.endswith("; ...")


def test_bytes_that_are_no_text_cost_their_line_only(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress(line().encode() + b"\n\xff\xfe{\n" + line("b").encode()))
    trace = load_trace(path)
    assert len(trace.episodes) == 2
    assert "mine.jsonl.gz:2" in trace.notes[0]


def test_a_trace_without_one_usable_line_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, "{", line(gen_tokens=-1))
    with pytest.raises(TraceError, match=r"mine\.jsonl:1: .*mine\.jsonl:2: .*none of its 2 lines"):
        load_trace(path)
    with pytest.raises(TraceError, match="holds no trajectory"):
        load_trace(written(tmp_path, ""))


def test_a_tool_that_ended_before_it_began_took_no_time(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, line(tool_latency_s=-0.25), line("b")))
    assert [episode.turns[0].tool_s for episode in trace.episodes] == [0.0, 0.5]
    assert trace.notes == ("mine: 1 of 2 tool times are below 0 and count as 0",)


def test_a_bench_warns_of_what_was_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, line(), line(), "{")
    config = ExperimentConfig.parse(
        Conditions(traces=(str(path),), gpus=8, policies="libra", planners="libra", drift="none")
    )
    assert any("1 of 3 lines left out" in warning for warning in config.warnings)


def three_turns(prompt: int = 100) -> RecordedEpisode:
    """270 tokens: 100, then 20 and 50 from a tool, 30 and 40, and 30."""
    turns = [Turn(20, 50, "ls", None, 1.0), Turn(30, 40, "ls", None, 2.0), Turn(30, 0, "", None, 4)]
    return RecordedEpisode("t", prompt, tuple(turns), 1.0)


def test_an_episode_with_room_for_all_of_it_is_not_cut() -> None:
    episode = three_turns()
    assert episode.cut(270) is episode
    assert episode.sample(270) == TrajectorySample(100, 80, 90, turns=3, tool_s=7.0)


@pytest.mark.parametrize(
    ("max_len", "prompt", "generated", "observed", "turns", "tool_s"),
    [
        (269, 100, 79, 90, 3, 7.0),  # in the last generation
        (240, 100, 50, 50, 2, 3.0),  # the second tool's return fills it: no turn is left to play
        (210, 100, 50, 50, 2, 3.0),  # the second tool returns more than there is room for
        (180, 100, 30, 50, 2, 3.0),  # in the second generation
        (110, 100, 10, 0, 1, 1.0),
        (60, 59, 1, 0, 1, 1.0),  # the prompt itself has no room
    ],
)
def test_an_episode_is_cut_where_a_run_ends_it(
    max_len: int, prompt: int, generated: int, observed: int, turns: int, tool_s: float
) -> None:
    sample = three_turns().sample(max_len)
    assert sample == TrajectorySample(prompt, generated, observed, turns, tool_s)
