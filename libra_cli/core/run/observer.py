"""What the machine remembers for the planner: bounded windows over the records it writes anyway.

``RunObserver.saw`` takes every record in the order it is written, so a live run, the simulator and
who reads a run's database (``libra rebalance --dry-run`` and ``libra run --resume``) make the same
observation of the same run. Windows: the trajectories of two steps and at least ``LEAST_SAMPLES``,
``RECENT_TURNS`` turns, ``RECENT_STEPS`` steps. Limit: until the first steps' worth is trained a
live run and the simulator also know what waits for frozen models (``core.run.asked_now``), which is
in no row, and they alone know when a step is overdue.

After a sudden change of the work (``core.run.change_point``) only the steps since count, and as
many trajectories as they train: what was before is no evidence of what comes.

What tools take is told by every return, long before the trajectories end: those that have ended
stand for the work to come with their time in tools changed as that of all has changed since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from math import inf
from statistics import fmean

from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.survival import completed
from libra_cli.core.evidence import (
    CostEvidence,
    PlayedTurn,
    Recalibration,
)
from libra_cli.core.explanation import PastPrediction, past_prediction
from libra_cli.core.model_use import AskedModels, ModelDemand, uses_of
from libra_cli.core.observation import InPlay, MeasuredStep
from libra_cli.core.observed.early_work import EarlyWork
from libra_cli.core.observed.given_up import SlotsGivenUp
from libra_cli.core.observed.start_times import StartTimes
from libra_cli.core.observed.step_work import ExtraWork, workload_of
from libra_cli.core.observed.trained_steps import TrainedSteps
from libra_cli.core.observed.under_way import TrajectoriesUnderWay
from libra_cli.core.planning.admission import RECENT
from libra_cli.core.planning.triggers import FILLING, OVERDUE, steps_to_average
from libra_cli.core.records import (
    DecisionRecord,
    GroupRecord,
    MoveRecord,
    PlanRecord,
    Record,
    SlotRecord,
    StepRecord,
    SyncRecord,
    TrajectoryRecord,
    TurnRecord,
    VersionRecord,
)
from libra_cli.core.rollout.staleness import StalenessRule, rule_of
from libra_cli.core.run.asked_now import AskedNow
from libra_cli.core.run.change_point import WorkHistory
from libra_cli.core.token_worth import WINDOW, BoundEvidence, StepWorth, settling, step_worth
from libra_cli.core.types import Seconds, Tokens, is_evaluation
from libra_cli.core.workload import BatchOverhead, TrajectorySample, Workload

LEAST_SAMPLES = 256
"""Newest finished trajectories that stand for the work to come, where two steps have fewer."""
RECENT_TURNS = 20_000
"""Newest turns that the costs of servers are fitted to, where no profile is given."""


class RunObserver:
    """The windows, and what is made of them at a step's end."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._rule = rule_of(recipe.training)
        #: Steps until all that was begun under another bound is trained.
        self._settling = 0
        #: What the newest steps under this bound told of their tokens, and those with old ones.
        self._worths: deque[StepWorth] = deque(maxlen=WINDOW)
        self._aged: deque[StepWorth] = deque(maxlen=WINDOW)
        #: How steps differed from their prices under the bounds that were left, when they were.
        self._left: dict[int, Recalibration] = {}
        newest = max(LEAST_SAMPLES, 2 * recipe.trajectories_per_step)
        self._samples: deque[TrajectorySample] = deque(maxlen=newest)
        self.early = EarlyWork()
        self._in_play = InPlay()
        #: Generated tokens of the turns that have ended since the newest step.
        self._played_tokens: Tokens = 0
        self._measured: deque[MeasuredStep] = self._steps_kept()
        self._asked = AskedModels(RECENT)
        #: What is in no row; nothing where only rows are known.
        self.asked_now = AskedNow()
        self._lengths: deque[float] = deque(maxlen=RECENT)
        self._extras = ExtraWork()
        self._history = WorkHistory()
        self._ended_at: Seconds | None = None
        #: Since the run began, or went on.
        self._steps = 0
        self._plan = -1
        self._plan_at: Seconds = 0.0
        self._began_at: Seconds = 0.0
        self._trajectories = TrajectoriesUnderWay(newest)
        self._turns: deque[PlayedTurn] = deque(maxlen=RECENT_TURNS)
        self._training = TrainedSteps()
        self._starts = StartTimes()
        self._given_up = SlotsGivenUp()
        #: Since when a step that is measured has begun.
        self._measured_from: Seconds = 0.0
        self._version_bytes = 0
        self._sync_s: Seconds = 0.0
        self._link_bandwidth = 0.0
        self._predictions: deque[PastPrediction] = deque(maxlen=RECENT)

    def saw(self, record: Record) -> None:
        """Take in a record that is being written; trajectories that
        are not trained on are passed over.
        """
        match record:
            case TurnRecord() | TrajectoryRecord() if is_evaluation(record.group_id):
                self._evaluated(record)
            case TurnRecord():
                self._turns.append(self._trajectories.turn(record))
                self._played_tokens += record.generated_tokens
            case TrajectoryRecord():
                self._trajectory(record)
            case GroupRecord():
                self._training.group(record)
            case StepRecord() if not record.checkpoint:  # written again once it has one
                self._step(record)
            case SlotRecord() if not record.is_frozen:
                self._slot(record)
            case MoveRecord():
                self._starts.move(record)
                self._training.move(record)
            case _:
                self._saw_plan(record)

    def _evaluated(self, record: TurnRecord | TrajectoryRecord) -> None:
        """Take in what an evaluation plays, which asks frozen models too."""
        if isinstance(record, TrajectoryRecord) and record.state == "finished":
            self._asked.ended()

    def _slot(self, row: SlotRecord) -> None:
        """Take in a slot's row; steps with other slots at work are no measure of those to come."""
        self._starts.slot(row)
        self._training.slot(row)
        if self._given_up.slot(row):
            self._measured.clear()
            self._measured_from = row.since

    def _saw_plan(self, record: Record) -> None:
        match record:
            case PlanRecord() if record.plan > self._plan:
                self._new_plan(record)
            case VersionRecord():
                self._version_bytes = record.bytes
            case DecisionRecord():
                self._decision(record)
            case SyncRecord() if record.verified:
                self._sync_s = record.pull_s + record.load_s
                if record.kind == "full" and record.pull_s > 0:
                    speed = record.sent_bytes / record.pull_s
                    self._link_bandwidth = max(speed, self._link_bandwidth)
            case _:
                pass

    @property
    def workload(self) -> Workload | None:
        """The work to come, as the newest finished trajectories tell it; None before the first.

        In the first steps and where one is ``overdue``, where these are the short ones, those under
        way count with the lengths that they will have (``costs.survival``).
        """
        if not self._samples:
            return None
        since, early = self._history.since, self.early.ended
        # What has begun in an overdue step has met today's tools already.
        factor = 1.0 if self.early.overdue else self._trajectories.tools.factor
        done, alive = self._under_way if early else ([], [])
        newest = [*early, *done] if early else list(self._samples)
        if since is not None and not early:
            newest = newest[-since * self._recipe.trajectories_per_step :]
        ended = [replace(one, tool_s=one.tool_s * factor) for one in newest]
        samples = completed(ended, alive) if early else tuple(ended)
        extras = self._extras.mean(since or RECENT)
        work = workload_of(self._recipe, samples, extras, self._rule)
        planner = self._recipe.planner
        told = None if planner.trace else planner.lengths
        work = self.early.toward(told, work, len(ended))
        asked = self._asked.demands(since or RECENT, work.finished)
        return replace(work, models=asked)

    def first_demands(self, work: Workload) -> tuple[ModelDemand, ...]:
        """What a step of this work asks of frozen models, by ``asked_now`` before a step has ended.

        Who observes a run by its rows knows it from the first step on.
        """
        turns = fmean(one.turns for one in work.samples)
        now, (_, alive) = self.asked_now, self._under_way
        shares = [1.0] * self._asked.last_asked(now.all_uses)
        shares += [min(1.0, one.turns / turns) for one in alive]
        seconds = self._in_play.at - self._began_at
        return self._asked.first_demands(now.uses, seconds, shares, work.finished)

    @property
    def staleness(self) -> BoundEvidence | None:
        """What is known of the staleness bound; None where the recipe fixes it, and where a step is
        ``overdue``, for it was other work that told."""
        training = self._recipe.training
        if self.early.overdue or not training.staleness.is_chosen:
            return None
        return BoundEvidence(
            bound=self._rule.bound,
            bounds=training.bounds,
            steps=tuple(self._worths),
            aged=tuple(self._aged),
            left=dict(self._left),
        )

    def is_late(self, free_since: Seconds, *, now: Seconds) -> bool:
        """Whether the step under way takes ``OVERDUE`` times as long as the longest of the newest
        ones, which are as many as overlap or more: some are very short, and some wait. The trainer
        has been free for it since ``free_since``."""
        measured = self.measured
        if self.early.filling or self._ended_at is None or len(measured) <= self._rule.bound:
            return False
        return now - max(free_since, self._ended_at) > OVERDUE * max(
            step.step_s for step in measured
        )

    @property
    def first_ended(self) -> int:
        """Trajectories that have finished while the first steps' worth is in flight, or that have
        begun and finished in a step that is ``overdue``; 0 otherwise."""
        return len(self.early.ended)

    @property
    def first_error(self) -> float:
        """Standard error of the turns expected then, as a share; infinite where none is known."""
        return self.early.error(*self._under_way) if self.early.ended else inf

    @property
    def _under_way(self) -> tuple[list[TrajectorySample], list[TrajectorySample]]:
        """The trajectories under way that have played all their turns, and others that have played
        a turn.

        The former wait for a frozen model's last answer. They are as many as ``AskedModels`` tells,
        and taken to be the first of those that wait for their environment; none where that is less
        than half of these, which may wait for tools. In a step that is ``overdue`` they are those
        that have begun in it.
        """
        now, trajectories = self.asked_now, self._trajectories
        begun = trajectories.alive_since(self._ended_at if self.early.overdue else None)
        last = self._asked.last_asked(now.all_uses)
        done = dict(islice(now.asking.items(), last if 2 * last > len(now.asking) else 0))
        ended = [
            replace(one.so_far, tool_s=trajectories.tool_s(who, one.queued_at))
            for who, one in done.items()
            if not is_evaluation(who[0]) and (who in begun or not self.early.overdue)
        ]
        return ended, [one for who, one in begun.items() if who not in done]

    @property
    def signs(self) -> Mapping[str, float]:
        """Means over the newest trajectories other than lengths, by
        name; empty before the first ends.
        """
        newest = list(self._samples)[-self._recipe.trajectories_per_step :]
        if not newest:
            return {}
        extras = self._extras.mean(self._measured.maxlen or RECENT)
        return {
            "turns a trajectory": fmean(sample.turns for sample in newest),
            "tokens of a context": fmean(sample.context for sample in newest),
            "time in play over time on servers": self._trajectories.tools.stretch,
            "tokens played for each of a batch": extras.played if extras else 1.0,
        }

    @property
    def measured(self) -> tuple[MeasuredStep, ...]:
        """The newest steps under today's plan, with the slots that are there now, without the first
        of the run; none where the next one is ``overdue``."""
        if self.early.overdue:
            return ()
        return tuple(self._measured)[-(self._history.since or RECENT) :]

    @property
    def lacks_slots(self) -> bool:
        """Whether slots were given up with their host and have not worked since."""
        return bool(self._given_up)

    @property
    def lengths(self) -> tuple[float, ...]:
        """Mean generated tokens of the newest steps, oldest first; none where the next one is
        ``overdue``."""
        if self.early.overdue:
            return ()
        return tuple(self._lengths)[-(self._history.since or RECENT) :]

    @property
    def evidence(self) -> CostEvidence:
        """What the run has measured of its own costs."""
        return CostEvidence(
            turns=tuple(self._turns),
            steps=self._training.steps,
            ranks=self._training.ranks,
            starts=self._starts.seen(),
            version_bytes=self._version_bytes,
            link_bandwidth=self._link_bandwidth,
        )

    @property
    def predictions(self) -> tuple[PastPrediction, ...]:
        """Predictions of the newest decisions of which it is known what came."""
        return tuple(self._predictions)

    @property
    def sync_s(self) -> Seconds:
        """Seconds that a server took to pull and load the newest version."""
        return self._sync_s

    def _steps_kept(self) -> deque[MeasuredStep]:
        return deque(maxlen=steps_to_average(self._rule.overlap))

    def _decision(self, row: DecisionRecord) -> None:
        chosen = row.bound is not None and self._recipe.training.staleness.is_chosen
        if chosen and row.bound != self._rule.bound:
            self._left[self._rule.bound] = Recalibration(row.rollout_factor, row.training_factor)
            self._open_under(rule_of(self._recipe.training, row.bound))
        found = past_prediction(row.explanation, row.observed_s)
        if found is not None:
            self._predictions.append(found)

    def _open_under(self, rule: StalenessRule) -> None:
        """Groups are opened under another staleness rule from now on."""
        self._settling = settling(self._rule.bound, rule.bound)
        self._rule = rule
        self._measured = self._steps_kept()
        self._worths.clear()

    def _ages(self, row: StepRecord) -> None:
        """Take in what a step tells of its tokens by their age."""
        told = step_worth(row.metrics)
        if told is None:
            return
        if told.information:
            self._aged.append(told)
        if not self._settling:
            self._worths.append(told)

    def _trajectory(self, row: TrajectoryRecord) -> None:
        if row.ended_at is None:
            self._in_play.change(+1, now=row.started_at)
            self.early.began()
            return
        self._in_play.change(-1, now=row.ended_at)
        is_new = self._trajectories.began_since(row, self._ended_at)
        sample = self._trajectories.ended(row)
        if sample is not None and row.state == "finished":
            self._samples.append(sample)
            self._training.finished(row)
            self._asked.ended()
            self.early.finished(sample, is_new=is_new)

    def _step(self, row: StepRecord) -> None:
        self._ended_at = row.ended_at
        self.early.step()
        in_play_s, concurrency = self._in_play.take(now=row.ended_at)
        played_tokens, self._played_tokens = self._played_tokens, 0
        self._lengths.append(row.mean_length)
        extras = self._extras.step(row)
        self._training.step(row, extras.trained)
        is_planned = row.started_at >= self._plan_at
        self._asked.step(row.period_s, uses_of(row.batch), is_planned=is_planned)
        self._steps += 1
        self._ages(row)
        if self._steps > self._rule.bound:
            self.early.filled()
            self._history.add(self._work_of(row, extras))
        settling, self._settling = self._settling, max(0, self._settling - 1)
        if settling or self._steps <= FILLING or row.started_at < self._measured_from:
            return
        # The run's first groups reach their last call in one step: that wait does not recur.
        once_s = row.held_s if self._steps <= self._rule.overlap else 0.0
        train_s = max(row.train_s - row.compile_s, 1e-9)
        self._measured.append(
            MeasuredStep(
                step_s=max(row.period_s - once_s - row.compile_s, 1e-9),
                train_s=train_s,
                waited_s=row.waited_s - once_s,
                in_play_s=in_play_s,
                concurrency=concurrency,
                held_s=row.held_s - once_s,
                played_tokens=played_tokens,
            )
        )

    def _work_of(self, row: StepRecord, extras: BatchOverhead) -> Mapping[str, float]:
        """Return what a step's work was like, in numbers above zero."""
        length = max(row.mean_length, 1.0)
        return {
            "length": length,
            "context": length * max(1.0, row.context_tokens / max(1, row.generated_tokens)),
            "turn_s": self._trajectories.tools.take_turn_s(),
            "played": extras.played,
        }

    def _new_plan(self, row: PlanRecord) -> None:
        self._asked.new_plan()
        if row.cause == "start":  # also of a run that goes on: nothing is in play
            self._began_at = row.at
            self._given_up = SlotsGivenUp()  # it has begun on all its hosts
            self._asked.begin()
            self._steps, self._ended_at = 0, None
            self._in_play.begin(now=row.at)
            self._trajectories = TrajectoriesUnderWay(self._samples.maxlen or 0)
            self.early.run_begins(is_known=bool(self._samples))
        self._plan, self._plan_at, self._measured_from = row.plan, row.at, row.at
        self._measured.clear()
        self._training.plan(row)
