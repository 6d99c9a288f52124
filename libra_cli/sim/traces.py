"""Recorded trajectories, and how groups are drawn from them.

A trace is a file, or one that comes with libra, by the beginning of its name. It is JSON lines,
plain or gzipped, one trajectory a line:
``{"source": ..., "task": ..., "turns": [{"prompt_tokens": ..., "gen_tokens": ..., "tool": ...,
"tool_ok": ..., "tool_latency_s": ..., "obs_tokens": ...}, ...]}``, and ``reward``. Trajectories of
one task of one source are siblings. What no line says is left out, and ``Trace.lacks`` tells. A
line that cannot be used is left out too, and a tool time below 0 (two clocks that disagree) counts
as 0: ``Trace.notes`` says how many.

The tokens a tool returned are the growth of the context between two calls, less what was generated;
where a context shrinks (the agent forgot something) they count as none. Traces are other models'
evaluation traffic, not RL rollouts.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from math import isfinite
from pathlib import Path
from random import Random
from typing import IO, Any, NoReturn

from libra_cli.config.errors import InputError, did_you_mean
from libra_cli.core.types import Seconds, Tokens, ToolOutcome
from libra_cli.core.workload import TrajectorySample

DEFAULT_TRACE = "tau2bench"
_SUFFIXES = (".jsonl.gz", ".jsonl")
TOOL_S: Seconds = 1.0
"""A tool call's time where the trace has recorded none; assumed."""
OUTCOMES = {True: ToolOutcome.OK, False: ToolOutcome.ERROR}


TOLD = 3
"""Reasons that are told of the lines left out."""


class TraceError(InputError):
    """A trace that cannot be read, or none of its lines; says file and line."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A generation and the tool return after it. ``outcome`` None: no tool, or not recorded."""

    generated: Tokens
    observation: Tokens
    tool: str
    outcome: ToolOutcome | None
    tool_s: Seconds


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """A recorded trajectory, with its lengths in tokens and its tools' times in seconds."""

    task: str
    prompt: Tokens
    turns: tuple[Turn, ...]
    reward: float

    @property
    def generated(self) -> Tokens:
        """Tokens that the model produced."""
        return sum(turn.generated for turn in self.turns)

    @property
    def context(self) -> Tokens:
        """Tokens at its end: prompt, generated and tool tokens."""
        return self.prompt + sum(turn.generated + turn.observation for turn in self.turns)

    def cut(self, max_len: Tokens) -> RecordedEpisode:
        """The same as far as a run plays it whose contexts have ``max_len`` tokens at most.

        A run generates until the context is full, and ends a trajectory whose tools return more
        than there is room for. A prompt without room for a token, which no run plays, is cut too.
        """
        if self.context <= max_len:
            return self
        prompt = min(self.prompt, max_len - 1)
        turns: list[Turn] = []
        room = max_len - prompt
        for turn in self.turns:
            generated = min(turn.generated, room)
            room -= generated + turn.observation
            if room <= 0:
                turns.append(replace(turn, generated=generated, observation=0))
                break
            turns.append(turn)
        return replace(self, prompt=prompt, turns=tuple(turns))

    def sample(self, max_len: Tokens) -> TrajectorySample:
        """The same, cut at ``max_len`` tokens, as a planner counts it."""
        played = self.cut(max_len)
        return TrajectorySample(
            prompt=played.prompt,
            generated=played.generated,
            observed=played.context - played.prompt - played.generated,
            turns=len(played.turns),
            tool_s=sum(turn.tool_s for turn in played.turns),
        )

    def stretched(self, factor: float) -> RecordedEpisode:
        """The same with every generation ``factor`` times as long, at least one token."""
        turns = tuple(
            replace(turn, generated=max(1, round(turn.generated * factor))) for turn in self.turns
        )
        return replace(self, turns=turns)

    def repeated(self, factor: float) -> RecordedEpisode:
        """The same with ``factor`` times as many turns: those before the last, over and over.

        One of a single turn stays as it is: there is nothing that it could do again.
        """
        *body, last = self.turns
        number = max(1, round(len(self.turns) * factor)) - 1
        turns = tuple(body[at % len(body)] for at in range(number)) if body else ()
        return replace(self, turns=(*turns, last))

    def padded(self, factor: float) -> RecordedEpisode:
        """The same with a prompt and tool returns of ``factor`` times as many tokens."""
        turns = tuple(
            replace(turn, observation=round(turn.observation * factor)) for turn in self.turns
        )
        return replace(self, prompt=max(1, round(self.prompt * factor)), turns=turns)

    def with_tool_times(self, times: Sequence[Seconds]) -> RecordedEpisode:
        """The same with these seconds after its turns: in a tool, or until a user replies."""
        pairs = zip(self.turns, times, strict=True)
        return replace(self, turns=tuple(replace(turn, tool_s=tool_s) for turn, tool_s in pairs))


@dataclass(frozen=True, slots=True)
class Trace:
    """A file of trajectories. ``lacks`` names what its lines do not say; ``notes`` are sentences
    on what was left out or set right."""

    name: str
    episodes: tuple[RecordedEpisode, ...]
    lacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def by_task(self) -> dict[str, list[RecordedEpisode]]:
        """The episodes of each task, in the order of the file."""
        tasks: dict[str, list[RecordedEpisode]] = {}
        for episode in self.episodes:
            tasks.setdefault(episode.task, []).append(episode)
        return tasks

    def groups(self, random: Random, size: int) -> Iterator[tuple[RecordedEpisode, ...]]:
        """Groups of ``size`` for ever: a random task, its trials in random order.

        A task with fewer trials is filled up with trials of random others, never with copies: a
        copy would let a scheduler that looks at siblings see the future. All have the prompt of the
        first, for a group has one, which siblings on a server compute once.
        """
        tasks = list(self.by_task().values())
        while True:
            chosen = random.choice(tasks)
            group = random.sample(chosen, min(size, len(chosen)))
            while len(group) < size:
                group.append(random.choice(self.episodes))
            yield tuple(replace(one, prompt=group[0].prompt) for one in group)


def load_trace(name_or_path: str | Path) -> Trace:
    """Read a trace file, or the shipped trace whose name begins so.

    A line that is not a trajectory is left out; ``Trace.notes`` counts them.

    Raises:
        TraceError: no such trace, or not one line of it can be used; with file and line.
    """
    path = _find(name_or_path) if isinstance(name_or_path, str) else name_or_path
    lines = _TraceLines(path)
    for number, text in _texts(path):
        lines.take(number, text)
    if not lines.episodes:
        lines.refuse()
    return Trace(_stem(path.name), tuple(lines.episodes), _lacks(lines.rows), lines.notes)


def shipped_traces() -> dict[str, Path]:
    """The traces that come with libra, by name."""
    directory = Path(str(files("libra_cli") / "traces"))
    found = [path for path in sorted(directory.glob("*")) if path.name.endswith(_SUFFIXES)]
    return {_stem(path.name): path for path in found}


def _find(name: str) -> Path:
    if name.endswith(_SUFFIXES) or Path(name).exists():
        return Path(name)
    shipped = shipped_traces()
    found = [path for known, path in shipped.items() if known.startswith(name) and name]
    if len(found) == 1 or name in shipped:
        return shipped.get(name) or found[0]
    raise TraceError(
        f"{name!r} is neither a file nor the beginning of one shipped trace's name"
        f" (shipped: {', '.join(shipped)}){did_you_mean(name, shipped)}",
        hint=f"libra bench --trace FILE.jsonl.gz, or a shipped name such as {DEFAULT_TRACE}",
    )


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".jsonl")


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, by number."""
    try:
        with _opened(path) as file:
            yield from ((at, line) for at, line in enumerate(file, start=1) if line.strip())
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}", hint=f"ls -l {path}") from error


def _opened(path: Path) -> IO[str]:
    """Open a trace, plain or gzipped; bytes that are no UTF-8 are replaced."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


class _TraceLines:
    """The lines of a file read so far: what they hold, and what is wrong with the others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.episodes: list[RecordedEpisode] = []
        #: Why the first lines that were left out were, and how many were.
        self._reasons: list[str] = []
        self._left_out = 0
        self._clipped = 0

    def take(self, number: int, text: str) -> None:
        """Read one more line of the file, or note why it cannot be used."""
        try:
            row = json.loads(text)
            episode = _episode(row)
        except _UNUSABLE as error:
            self._left_out += 1
            if len(self._reasons) < TOLD:
                self._reasons.append(f"{self.path}:{number}: {_reason(error)}")
            return
        self.rows.append(row)
        self._clipped += sum(turn.tool_s < 0 for turn in episode.turns)
        self.episodes.append(_without_negative_times(episode))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the lines left out, with the first reasons,
        and on times that were corrected.
        """
        notes = []
        if self._left_out:
            every = self._left_out + len(self.episodes)
            more = "; ..." if self._left_out > len(self._reasons) else ""
            reasons = "; ".join(self._reasons)
            notes.append(f"{self._left_out} of {every} lines left out: {reasons}{more}")
        if self._clipped:
            turns = sum(len(episode.turns) for episode in self.episodes)
            notes.append(f"{self._clipped} of {turns} tool times are below 0 and count as 0")
        return tuple(f"{_stem(self.path.name)}: {note}" for note in notes)

    def refuse(self) -> NoReturn:
        """Refuse a file of which no line could be used.

        Raises:
            TraceError: always, with the first reasons.
        """
        hint = "a line is {task, turns: [{prompt_tokens, gen_tokens, tool, tool_ok, ...}]}"
        if not self._reasons:
            raise TraceError(f"{self.path}: holds no trajectory", hint=hint)
        which = "its only line" if self._left_out == 1 else f"none of its {self._left_out} lines"
        able = "cannot" if self._left_out == 1 else "can"
        raise TraceError(f"{'; '.join(self._reasons)} ({which} {able} be used)", hint=hint)


_UNUSABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON ({error})"
    return f"lacks {error}" if isinstance(error, KeyError) else str(error)


def _episode(row: Any) -> RecordedEpisode:
    """The trajectory of a line; tool times may be negative. Raises one of ``_UNUSABLE``."""
    calls = row["turns"]
    if not calls:
        raise ValueError("has no turns")
    turns = tuple(_turn(call, after) for call, after in zip(calls, [*calls[1:], None], strict=True))
    if any(turn.generated < 1 or turn.observation < 0 for turn in turns):
        raise ValueError("has a negative count")
    if not all(isfinite(turn.tool_s) for turn in turns):
        raise ValueError("has a tool time that is no number")
    return RecordedEpisode(
        task=f"{row.get('source', '')}/{row['task']}",
        prompt=max(1, int(calls[0]["prompt_tokens"])),
        turns=turns,
        reward=float(row.get("reward") or 0.0),
    )


def _without_negative_times(episode: RecordedEpisode) -> RecordedEpisode:
    turns = tuple(replace(turn, tool_s=max(0.0, turn.tool_s)) for turn in episode.turns)
    return episode if turns == episode.turns else replace(episode, turns=turns)


def _turn(call: dict[str, Any], after: dict[str, Any] | None) -> Turn:
    generated, prompt = int(call["gen_tokens"]), int(call["prompt_tokens"])
    grown = int(call.get("obs_tokens") or 0)
    if after is not None:
        grown = max(0, int(after["prompt_tokens"]) - prompt - generated)
    latency = call.get("tool_latency_s")
    return Turn(
        generated=max(generated, 1) if generated == 0 else generated,
        observation=grown,
        tool=str(call.get("tool") or ""),
        outcome=OUTCOMES.get(call["tool_ok"]) if call.get("tool_ok") is not None else None,
        tool_s=TOOL_S if latency is None else float(latency),
    )


def _lacks(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    calls = [call for row in rows for call in row["turns"]]
    lacks = []
    if all(call.get("tool_ok") is None for call in calls):
        lacks.append("tool outcomes")
    if all(call.get("tool_latency_s") is None for call in calls):
        lacks.append("tool times")
    if all(row.get("reward") is None for row in rows):
        lacks.append("rewards")
    if len({(row.get("source"), row["task"]) for row in rows}) == len(rows):
        lacks.append("siblings")
    return tuple(lacks)
