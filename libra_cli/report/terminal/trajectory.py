"""Trajectories in a terminal: a table of a step's, and one as a conversation.

Tokens that are told apart by a value have its colour. Where there are no colours (a pipe, NO_COLOR)
the value stands in the text: ``{+0.53: the tokens that have it}``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, inf
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libra_cli.config.text import printable
from libra_cli.core.records import TurnRecord
from libra_cli.report.terminal.console import fact, grid, number
from libra_cli.report.terminal.plots import Portable
from libra_cli.report.trajectories.choice import PlayedTrajectory, first_by, have_one_reward
from libra_cli.report.trajectories.conversation import PlayedConversation, ShownMessage, ShownToken

_ROWS = 40
_ROLE_STYLES = {"system": "magenta", "user": "blue", "assistant": "bold green", "tool": "yellow"}
_VERSION_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""Styles of weight versions, the oldest first; after the last they begin again."""
_IMPROBABLE = ((0.01, "bold red", "<1%"), (0.1, "red", "<10%"), (0.5, "yellow", "<50%"))
"""Probability below which a token has the style and the mark."""
_RATIOS = (
    (0.5, "bold red", "<0.5"),
    (0.8, "red", "<0.8"),
    (1.25, "", ""),
    (2.0, "cyan", ">1.25"),
    (inf, "bold cyan", ">2"),
)
"""The trainer's probability over the rollout policy's up to which a token has the style and the
mark; the ends are those of ``rollout_ratio/below_half`` and ``above_2``."""
_UNTRAINED = "not trained"
_ONE_LINE = 16
"""Number of token ids on a line."""


def table_view(
    run_dir: Path, step: int | None, played: Sequence[PlayedTrajectory]
) -> RenderableType:
    """The trajectories of a step, and what to type to see one."""
    if not played:
        what = "No trajectory has ended yet" if step is None else f"Step {step} has no trajectories"
        return Text(f"{what}; libra status {run_dir} says more.", overflow="fold")
    ranked = sorted(played, key=lambda one: (one.row.group_id, one.row.member))
    where = "not trained yet" if step is None else f"step {step}"
    title = Text.assemble((f"{run_dir.name}  {where}", "bold"), f"  {len(played)} trajectories")
    parts: list[RenderableType] = [title, Text(), Padding(_table(ranked[:_ROWS]), (0, 0, 0, 2))]
    if len(ranked) > _ROWS:
        parts.append(Text(f"  and {len(ranked) - _ROWS} more", "dim"))
    worst, at = first_by("worst", played), f" --step {step}" if step else ""
    ranking = "longest" if have_one_reward(played) else "worst"
    next_ones = (
        f"libra show {run_dir} {worst.id.group}.{worst.id.member}",
        f"libra show {run_dir}{at} --longest",
        f"libra show {run_dir}{at} --{ranking} --color version",
    )
    lines = [Text(f"  {line}", overflow="fold") for line in next_ones]
    return Portable(Group(*parts, Text(), Text("read one of them:"), *lines))


def _table(played: Sequence[PlayedTrajectory]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    named = any(one.row.environment for one in played)
    table.add_column("trajectory", no_wrap=True)
    if named:
        table.add_column("environment", no_wrap=True, overflow="ellipsis", max_width=14)
    for name in ("reward", "over group", "turns", "tokens", "cut", "versions"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in played:
        row = one.row
        table.add_row(
            f"{row.group_id}.{row.member}" + (f".{row.attempt}" if row.attempt else ""),
            *([row.environment] if named else []),
            number(row.reward),
            f"{one.over_group:+.2f}",
            str(row.turns),
            f"{row.generated_tokens:,}",
            "yes" if row.truncated else "no",
            _versions(row.min_version, row.max_version),
        )
    return table


def _versions(low: int | None, high: int | None) -> str:
    if low is None or high is None:
        return "–"
    return str(low) if low == high else f"{low} to {high}"


def conversation_view(told: PlayedConversation, color: str = "") -> RenderableType:
    """One trajectory: what is known of it, then its messages."""
    parts: list[RenderableType] = [_heading(told), Text()]
    if color and told.branches:
        parts += [_Legend(told, color), Text()]
    for number_, messages in enumerate(told.branches):
        if len(told.branches) > 1:
            parts += [Text(_branch(told, number_), "bold"), Text()]
        for message in messages:
            parts += _message(told, message, color)
    if told.problem:
        parts += [Text(f"! {told.problem}", "yellow", overflow="fold"), Text()]
        parts += [_ids(branch.token_ids) for branch in told.tokens]
    if not told.tokens:
        parts.append(Text("Its tokens were not kept."))
    return Portable(Group(*parts))


def _branch(told: PlayedConversation, number_: int) -> str:
    """Return what a branch is: whose conversation, of an environment with roles."""
    role = told.tokens[number_].role
    named = f"{printable(role)}, " if role else ""
    return f"{named}branch {number_ + 1} of {len(told.branches)}"


def _heading(told: PlayedConversation) -> RenderableType:
    one, row = told.played, told.played.row
    title = Text.assemble((f"trajectory {row.group_id}.{row.member}", "bold"))
    title.append(f"  attempt {row.attempt}" if row.attempt else "")
    title.append(f"  {told.run_dir.name}", "dim")
    facts = grid()
    trained = f"trained in step {one.step}" if one.step else f"{row.state}, not trained"
    fact(facts, "reward", Text(number(row.reward), "bold"), f"{one.over_group:+.3g} over its group")
    fact(facts, "state", trained, row.environment, "cut by a limit" if row.truncated else "")
    tokens = f"{row.generated_tokens:,} generated of {row.context_tokens:,} tokens"
    fact(facts, "turns", str(row.turns), tokens)
    fact(facts, "versions", _versions(row.min_version, row.max_version))
    named = "   ".join(f"{name} {number(value)}" for name, value in row.metrics.items())
    if named:
        fact(facts, "metrics", named)
    if calls := _calls(told.turns):
        fact(facts, "tools", calls)
    if row.detail:
        fact(facts, "detail", row.detail)
    return Group(title, Padding(facts, (0, 0, 0, 2)))


def _calls(turns: Sequence[TurnRecord]) -> str:
    """``get ok x 3, get error``: what the tools said, in order."""
    said = [f"{call.tool} {call.outcome}" for turn in turns for call in turn.tools]
    runs = [(words, len(list(same))) for words, same in groupby(said)]
    return ", ".join(words if count == 1 else f"{words} x {count}" for words, count in runs)


def _message(told: PlayedConversation, message: ShownMessage, color: str) -> list[RenderableType]:
    head = Text(message.role, _ROLE_STYLES.get(message.role, "bold"))
    if message.turn is not None:
        head.append(f"  {'; '.join(_of_turn(told, message))}", "dim")
    body = _Tokens(message.tokens, color if message.turn is not None else "", told)
    return [head, Padding(body, (0, 0, 0, 2)), Text()]


def _of_turn(told: PlayedConversation, message: ShownMessage) -> Iterator[str]:
    yield f"turn {message.turn}"
    yield f"{message.length} tokens"
    if message.versions:
        yield f"version {_versions(message.versions[0], message.versions[-1])}"
    if message.advantages:
        yield f"advantage {' to '.join(f'{value:+.3g}' for value in message.advantages[:3])}"
    turn = (message.turn or 0) - 1
    if len(told.branches) == 1 and turn < len(told.turns):
        if told.turns[turn].finish_reason not in ("stop", ""):
            yield told.turns[turn].finish_reason
        if calls := _calls(told.turns[turn : turn + 1]):
            yield calls


def _ids(token_ids: Sequence[int]) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    for start in range(0, len(token_ids), _ONE_LINE):
        line = " ".join(map(str, token_ids[start : start + _ONE_LINE]))
        table.add_row(Text(str(start), "dim"), Text(line, overflow="fold"))
    return Padding(table, (0, 0, 1, 2))


@dataclass(frozen=True, slots=True)
class _Mark:
    """How tokens of one value are told from others."""

    label: str
    """The name in the legend, and without colours in the text; empty for none."""
    style: str = ""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens in their colours, or with their values in the text where there are none."""

    tokens: Sequence[ShownToken]
    color: str
    told: PlayedConversation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = console.color_system is None or console.no_color
        mark_of = _Marks(self.told, self.color)
        text = Text(overflow="fold")
        for mark, tokens in groupby(self.tokens, key=mark_of):
            said = printable("".join(token.text for token in tokens))
            text.append(f"{{{mark.label}: {said}}}" if plain and mark.label else said, mark.style)
        yield text


@dataclass(frozen=True, slots=True)
class _Legend:
    """What the colours mean, or the marks where there are none."""

    told: PlayedConversation
    color: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = console.color_system is None or console.no_color
        marks = _Marks(self.told, self.color).all()
        words = Text(f"{self.color}: ", "bold", overflow="fold")
        for mark in marks:
            words.append(f"{{{mark.label}: ...}}" if plain else mark.label, mark.style)
            words.append("  ")
        yield words


class _Marks:
    """The marks of a trajectory's tokens, by what they are to be told apart by."""

    def __init__(self, told: PlayedConversation, color: str) -> None:
        self._color = color
        turns = [m for messages in told.branches for m in messages if m.turn is not None]
        self._versions = sorted({version for message in turns for version in message.versions})
        self._unknown = {None for m in turns for token in m.tokens if token.ratio is None}
        self._advantages = sorted({value for message in turns for value in message.advantages})

    def __call__(self, token: ShownToken) -> _Mark:
        match self._color:
            case "version" if token.version is not None:
                return self._of_version(token.version)
            case "advantage" if token.advantage is not None:
                return _of_advantage(token.advantage)
            case "logprob" if token.logprob is not None:
                return _of_probability(exp(token.logprob))
            case "ratio":
                return _of_ratio(token.ratio)
            case _:
                return _Mark("")

    def all(self) -> list[_Mark]:
        """The marks that may occur, for the legend."""
        if self._color == "version":
            return [self._of_version(version) for version in self._versions]
        if self._color == "advantage":
            return list(dict.fromkeys(map(_of_advantage, self._advantages)))
        if self._color == "ratio":
            return list(dict.fromkeys(map(_of_ratio, (0.0, 0.5, 1.25, 2.0, *self._unknown))))
        return [_Mark(label, style) for _, style, label in _IMPROBABLE]

    def _of_version(self, version: int) -> _Mark:
        at = self._versions.index(version)
        return _Mark(f"v{version}", _VERSION_STYLES[at % len(_VERSION_STYLES)])


def _of_advantage(value: float) -> _Mark:
    style = "green" if value > 0 else "red" if value < 0 else "dim"
    return _Mark(f"{value:+.2f}", f"bold {style}" if abs(value) >= 1 else style)


def _of_probability(probability: float) -> _Mark:
    for bound, style, label in _IMPROBABLE:
        if probability < bound:
            return _Mark(label, style)
    return _Mark("")


def _of_ratio(ratio: float | None) -> _Mark:
    if ratio is None:
        return _Mark(_UNTRAINED, "dim")
    return next(_Mark(label, style) for most, style, label in _RATIOS if ratio < most)
