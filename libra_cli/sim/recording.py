"""The records of a simulated run that its results are computed from."""

from __future__ import annotations

from dataclasses import dataclass, field

from libra_cli.core.records import (
    DecisionRecord,
    GroupRecord,
    LateRecord,
    MoveRecord,
    PlanRecord,
    Record,
    SlotRecord,
    StepRecord,
    TrajectoryRecord,
    TurnRecord,
)
from libra_cli.core.types import Seconds


@dataclass(slots=True)
class Recording:
    """The records of one simulated run that its results are computed from."""

    steps: list[StepRecord] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    trajectories: list[TrajectoryRecord] = field(default_factory=list)
    slots: list[tuple[Seconds, SlotRecord]] = field(default_factory=list)
    #: When each step began and ended; of a streamed one the last part, and all parts before it.
    trained: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    parts: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    #: The newest row of every move of a slot, by number.
    moves: dict[int, MoveRecord] = field(default_factory=dict)
    #: The newest row of every plan, by number; when the planner looked, and after which step.
    plans: dict[int, PlanRecord] = field(default_factory=dict)
    looks: list[tuple[Seconds, int]] = field(default_factory=list)
    #: Groups that were trained; members that their group was closed without, by (group, member):
    #: the step that trained them later, or none yet; members that were given up.
    groups: set[int] = field(default_factory=set)
    late: dict[tuple[int, int], int | None] = field(default_factory=dict)
    dropped: set[tuple[int, int]] = field(default_factory=set)
    ended_at: Seconds = 0.0

    @property
    def idle_train(self) -> float:
        """The share of the run in which the trainer had nothing to do."""
        worked = (end - start for start, end in [*self.trained, *self.parts])
        return 1.0 - sum(worked) / self.ended_at

    def keep(self, record: Record, now: Seconds) -> None:
        """Keep a record, if results are computed from records of its kind."""
        if isinstance(record, TurnRecord):
            self.turns.append(record)
        elif isinstance(record, StepRecord) and not record.checkpoint:
            self.steps.append(record)  # once; it is told again with its checkpoint
        elif isinstance(record, TrajectoryRecord) and record.state == "finished":
            self.trajectories.append(record)
        elif isinstance(record, TrajectoryRecord | GroupRecord | LateRecord):
            self._keep_end(record)
        elif isinstance(record, SlotRecord):
            self.slots.append((now, record))
        elif isinstance(record, MoveRecord | PlanRecord | DecisionRecord):
            self._keep_plan(record)

    def _keep_plan(self, record: MoveRecord | PlanRecord | DecisionRecord) -> None:
        """Keep a plan, one of its moves, or when the planner decided."""
        if isinstance(record, MoveRecord):
            self.moves[record.move] = record
        elif isinstance(record, PlanRecord):
            self.plans[record.plan] = record
        elif record.explanation_json != "{}" and record.observed_s is None:
            # Once: the row is told again when it is known what came.
            self.looks.append((record.at, record.step))

    def _keep_end(self, record: TrajectoryRecord | GroupRecord | LateRecord) -> None:
        """Keep that a group was trained, or a member trained late or dropped."""
        if isinstance(record, LateRecord):
            self.late[record.group_id, record.member] = record.step
        elif isinstance(record, GroupRecord) and record.state == "trained":
            self.groups.add(record.group_id)
        elif isinstance(record, TrajectoryRecord) and record.state == "dropped":
            self.dropped.add((record.group_id, record.member))
