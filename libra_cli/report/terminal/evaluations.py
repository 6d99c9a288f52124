"""Shows the results of evaluations, in a line for people and in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from libra_cli.report.status.evaluations import EvaluationPart


def evaluation_words(part: EvaluationPart) -> str:
    """One line for people: ``held-out  step 20  pass@1 0.41 → 0.62 [0.51, 0.72]  pass@4 0.81``."""
    words = [part.name]
    if part.step is not None:
        words += [f"step {part.step}", *_estimates(part)]
    if part.playing is not None:
        words.append(f"step {part.playing} playing: {part.played} of {part.wanted}")
    return "  ".join(words)


def _estimates(part: EvaluationPart) -> list[str]:
    """The estimates of a finished evaluation; none where its environment broke every time."""
    metrics = part.metrics
    passes = sorted((name for name in metrics if _is_pass(name)), key=_k)
    if not passes:
        return [f"all {part.failed} trajectories failed"]
    lost = [f"{part.failed} of {part.wanted} trajectories failed"] if part.failed else []
    most = [f"{name} {_number(metrics[name])}" for name in passes[1:][-1:]]
    average = next(name for name in metrics if name.startswith("avg@"))
    return [_interval("pass@1", part), *most, f"reward {_number(metrics[average])}", *lost]


def evaluation_table(parts: Sequence[EvaluationPart]) -> Table:
    """Draw a row for every estimate of every evaluation, with its 95 % interval."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("evaluation", "estimate", "value", "95 % interval", "tasks", "failed"):
        table.add_column(title, justify="left" if title in ("evaluation", "estimate") else "right")
    for part in parts:
        named = part.metrics
        for name in (one for one in named if "@" in one and "/" not in one):
            tasks, value = f"{part.tasks} x {part.samples}", _number(named[name])
            table.add_row(part.name, name, value, _ends(name, named), tasks, str(part.failed))
    return table


def _ends(name: str, metrics: Mapping[str, float]) -> str:
    """The interval of an estimate in words; of a reward of one task there is none."""
    if f"{name}/low" not in metrics:
        return _number(None)
    return f"{_number(metrics[f'{name}/low'])} to {_number(metrics[f'{name}/high'])}"


def _interval(name: str, part: EvaluationPart) -> str:
    now, first = part.metrics, part.first
    low, high = _number(now.get(f"{name}/low")), _number(now.get(f"{name}/high"))
    before = f"{_number(first.get(name))} → " if first != now else ""
    return f"{name} {before}{_number(now.get(name))} [{low}, {high}]"


def _is_pass(name: str) -> bool:
    """Whether it is the name of a pass@k itself, and not of an end of its interval."""
    return name.startswith("pass@") and "/" not in name


def _k(name: str) -> int:
    return int(name.partition("@")[2])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
