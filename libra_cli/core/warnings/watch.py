"""What the rules say of a run, told once: a warning is told again only after it has gone away.

    told       when its rule says something and the warning does not hold yet
    goes away  when its rule has said nothing for ``QUIET`` steps in a row

A warning is a ``NoteRecord`` of kind ``learning``, whose subject is the name of the rule. After a
rollback the steps that were undone are forgotten; warnings told of them hold until they go away.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import fmean

from libra_cli.core.records import NoteRecord, Record, StepRecord
from libra_cli.core.types import Seconds
from libra_cli.core.warnings.rules import LONGEST, RULES, WINDOW, RuleBounds
from libra_cli.core.warnings.series import FIRST_GAP, Numbers, numbers_of

KIND = "learning"
"""The kind of notes that are warnings."""
QUIET = 30
"""Steps without its rule's word after which a warning has gone away."""


def where_to_look(step: int) -> str:
    """Return the command that shows the worst trajectories of the step."""
    return f"libra show RUN_DIR --step {step} --worst"


class LearningWatch:
    """The newest steps, and the warnings that hold."""

    def __init__(self, bounds: RuleBounds) -> None:
        self._bounds = bounds
        self._steps: deque[tuple[int, Numbers]] = deque(maxlen=LONGEST)
        self._first_gaps: dict[int, float] = {}
        """The gaps of the first ``WINDOW`` steps that have one, by step."""
        self._held: dict[str, NoteRecord] = {}
        self._quiet: dict[str, int] = {}

    def remember(self, record: Record) -> None:
        """Take in a row that the run wrote before it goes on; nothing is told of it again."""
        match record:
            case StepRecord():
                self._add(record)
            case NoteRecord() if record.kind == KIND and record.resolved_at is None:
                self._hold(record)
            case _:
                pass

    def saw(self, step: StepRecord, *, now: Seconds) -> list[NoteRecord]:
        """Take in a step that is done, and return the warnings that begin or go away with it."""
        self._add(step)
        series = [numbers for _, numbers in self._steps]
        said = {name: rule(series, self._bounds) for name, rule in RULES.items()}
        told = [
            self._hold(NoteRecord(KIND, name, now, f"{text}; {where_to_look(step.step)}"))
            for name, text in said.items()
            if text and name not in self._held
        ]
        return told + [self._let_go(name, now) for name in self._gone(said)]

    def _add(self, step: StepRecord) -> None:
        while self._steps and self._steps[-1][0] >= step.step:
            self._steps.pop()
        self._steps.append((step.step, {**numbers_of(step), **self._first_gap(step)}))

    def _first_gap(self, step: StepRecord) -> Numbers:
        """Return the mean of the first steps' gaps, once they are all known."""
        self._first_gaps = {n: gap for n, gap in self._first_gaps.items() if n < step.step}
        if len(self._first_gaps) == WINDOW:
            return {FIRST_GAP: fmean(self._first_gaps.values())}
        if step.logprob_gap is not None:
            self._first_gaps[step.step] = step.logprob_gap
        return {}

    def _hold(self, note: NoteRecord) -> NoteRecord:
        self._held[note.subject], self._quiet[note.subject] = note, 0
        return note

    def _gone(self, said: dict[str, str]) -> list[str]:
        for name in self._held:
            self._quiet[name] = 0 if said.get(name) else self._quiet[name] + 1
        return [name for name in self._held if self._quiet[name] >= QUIET]

    def _let_go(self, name: str, now: Seconds) -> NoteRecord:
        del self._quiet[name]
        return replace(self._held.pop(name), resolved_at=now)
