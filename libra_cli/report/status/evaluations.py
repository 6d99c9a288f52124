"""What the evaluations of a run came to: the newest of each name, and the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libra_cli.core.records import EvaluationRecord
from libra_cli.report.status.parts import part_of


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """The evaluations of one name: the newest that has finished, and what is under way.

    ``step`` is that of the weights at which it began; ``version_mean`` the mean step of those that
    generated its tokens. ``metrics`` are by name: pass@1, pass@1/low, pass@1/high and so on, with
    95 % intervals; ``first`` are those of the first that finished. ``playing`` is the step of the
    one under way, ``played`` how many of its ``wanted`` trajectories are over.
    """

    name: str
    step: int | None
    version_mean: float | None
    tasks: int
    samples: int
    failed: int
    seconds: float | None
    metrics: dict[str, float]
    first: dict[str, float]
    playing: int | None
    played: int
    wanted: int


def evaluation_parts(
    rows: Sequence[EvaluationRecord], *, live: bool = True
) -> list[EvaluationPart]:
    """Return one part for each name, in the order in which they were first played.

    ``live``: whether the run goes on; where its controller was killed nothing is under way.
    """
    names = dict.fromkeys(row.name for row in rows)
    return [_part([row for row in rows if row.name == name], live=live) for name in names]


def _part(rows: Sequence[EvaluationRecord], *, live: bool) -> EvaluationPart:
    done = finished(rows)
    newest, shown = rows[-1], done[-1] if done else rows[-1]
    running = newest if newest.state == "running" and live else None
    return part_of(
        EvaluationPart,
        shown,
        step=shown.step if done else None,
        seconds=None if shown.ended_at is None else shown.ended_at - shown.started_at,
        metrics=shown.metrics if done else {},
        first=done[0].metrics if done else {},
        playing=running.step if running else None,
        played=running.finished + running.failed if running else 0,
        wanted=shown.tasks * shown.samples,
    )


def finished(rows: Iterable[EvaluationRecord]) -> list[EvaluationRecord]:
    return [row for row in rows if row.state == "finished"]
