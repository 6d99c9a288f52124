"""A run that was loaded, whose tables are read when they are first asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from libra_cli.api.rows import StepRow
from libra_cli.api.table import RowTable
from libra_cli.config.errors import StateError
from libra_cli.core.metric_names import step_metrics
from libra_cli.core.records import EvaluationRecord, MoveRecord, StepRecord, TurnRecord
from libra_cli.core.types import is_evaluation
from libra_cli.runtime.monitors.samples import Decoder
from libra_cli.runtime.store.joined_rows import TrajectoryRow
from libra_cli.runtime.store.reader import Reader


def load_run(path: str | Path) -> LoadedRun:
    """The run of a run directory, such as ``runs/quickstart-1``.

    Raises:
        StateError: there is none, or a newer libra wrote it.
    """
    return LoadedRun(Path(path))


class LoadedRun:
    """The rows that a run has written so far.

    A table is read when it is first asked for and then stays as it is. While the run goes on, two
    tables may be a moment apart; load the run again for what has come since.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with Reader(directory) as reader:
            run = reader.run()
        self.id: str = run.id
        """The name of the run directory."""
        self.state: str = run.state
        """starting, running, finished, failed or stopped; what a killed run was last."""
        self._decode = Decoder(directory / "model")

    def __repr__(self) -> str:
        return f"<run {self.id}, {self.state}>"

    @cached_property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe as the run resolved it, with the defaults of the libra that ran it; secrets
        are masked.

        Raises:
            StateError: the run has not written it yet.
        """
        path = self.directory / "recipe.json"
        try:
            recipe: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StateError(f"cannot read {path}: {error}") from error
        return recipe

    @cached_property
    def steps(self) -> RowTable[StepRow]:
        """The optimizer steps, in order."""
        with Reader(self.directory) as reader:
            return RowTable(StepRow, map(_step, reader.steps()))

    @cached_property
    def trajectories(self) -> RowTable[TrajectoryRow]:
        """All attempts at all trajectories, by group, member and attempt; not of evaluations."""
        with Reader(self.directory) as reader:
            return RowTable(TrajectoryRow, reader.trajectories())

    @cached_property
    def turns(self) -> RowTable[TurnRecord]:
        """The turns that are over, by trajectory and in order; not of evaluations."""
        with Reader(self.directory) as reader:
            rows = (row for row in reader.rows(TurnRecord) if not is_evaluation(row.group_id))
            return RowTable(TurnRecord, rows)

    @cached_property
    def evaluations(self) -> RowTable[EvaluationRecord]:
        """The evaluations, in the order in which they began."""
        with Reader(self.directory) as reader:
            return RowTable(EvaluationRecord, reader.evaluations())

    @cached_property
    def moves(self) -> RowTable[MoveRecord]:
        """The moves of slots between rollout and training, in order."""
        with Reader(self.directory) as reader:
            return RowTable(MoveRecord, reader.moves())

    def token_ids(self, trajectory: TrajectoryRow) -> list[list[int]]:
        """All its tokens, prompt and tools included, of each of its branches.

        Most trajectories have one. An agent that leaves its conversation for another has several,
        and the last is that which it ended in. There is none of one that has not ended.
        """
        key = (trajectory.group_id, trajectory.member, trajectory.attempt)
        with Reader(self.directory) as reader:
            return reader.token_ids(*key)

    def text(self, trajectory: TrajectoryRow, branch: int = -1) -> str:
        """Return the tokens of a branch as text, with the template's control tokens; empty without
        tokens.

        Raises:
            StateError: the run directory has no tokenizer, as after ``model/`` was deleted.
        """
        branches = self.token_ids(trajectory)
        try:
            return self._decode(branches[branch]) if branches else ""
        except OSError as error:
            raise StateError(f"cannot decode: {error}") from error


def _step(row: StepRecord) -> StepRow:
    return StepRow(row.step, row.started_at, row.ended_at, step_metrics(row), row.checkpoint)
