"""What the machine remembers for the planner: bounded windows over the records it writes anyway.

``RunObserver.saw`` takes every record in the order it is written, so a live run, the simulator and
a replay of a run's database (``runtime.store.replay``, for ``libra rebalance --dry-run`` and
``libra run --resume``) make the same observation of the same run. Windows: the trajectories of two
steps and at least ``LEAST_SAMPLES``, ``RECENT_TURNS`` turns, ``RECENT_STEPS`` steps. Limit: until
the first steps' worth is trained a live run and the simulator also know what waits for frozen
models (``core.run.asked_now``), which is in no row, and they alone know when a step is overdue.

After a sudden change of the work (``core.run.change_point``) only the steps since count, and as
many trajectories as they train: what was before is no evidence of what comes.

What tools take is told by every return, long before the trajectories end: those that have ended
stand for the work to come with their time in tools changed as that of all has changed since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, inf, log
from statistics import fmean

from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.survival import TurnSurvival, completed
from libra_cli.core.evidence import (
    CostEvidence,
    PlayedTurn,
    Recalibration,
    Starts,
    TrainedStep,
)
from libra_cli.core.explanation import PastPrediction, past_prediction
from libra_cli.core.model_use import AskedModels, ModelDemand, uses_of
from libra_cli.core.observation import InPlay, MeasuredStep
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
from libra_cli.core.run.asked_now import AskedNow, Member
from libra_cli.core.run.change_point import WorkHistory
from libra_cli.core.token_worth import WINDOW, BoundEvidence, StepWorth, settling, step_worth
from libra_cli.core.types import Seconds, SlotId, Tokens, is_evaluation
from libra_cli.core.workload import BatchOverhead, TrajectoryLimits, TrajectorySample, Workload

LEAST_SAMPLES = 256
"""Newest finished trajectories that stand for the work to come, where two steps have fewer."""
RECENT_TURNS = 20_000
"""Newest turns that the costs of servers are fitted to, where no profile is given."""
RECENT_STEPS = 50
"""Newest steps that the costs of training are fitted to, where no profile is given."""
RECENT_TOOLS = 1024
"""Newest turns that say how long tools and servers take now."""
LEAST_STEPS = 2
"""Steps under one plan that it takes to price training."""


def workload_of(
    recipe: Recipe,
    samples: tuple[TrajectorySample, ...],
    extras: BatchOverhead | None = None,
    rule: StalenessRule | None = None,
) -> Workload:
    """The work of a recipe's step, if it is like these trajectories; extras where none were seen
    are those that the recipe asks for, and the rule the one that a run begins with."""
    rule = rule or rule_of(recipe.training)
    return Workload(
        samples,
        recipe.trajectories_per_step,
        overlap=rule.overlap,
        late=rule.late,
        group_size=recipe.group_size,
        holders=rule.holders(recipe.group_size),
        ready=rule.ready,
        extras=extras or extras_of(recipe),
        limits=limits_of(recipe),
        keeps_kv=not recipe.weight_sync.clear_cache,
    )


def limits_of(recipe: Recipe) -> TrajectoryLimits:
    """Return the limits of a trajectory's growth, by the recipe."""
    rollout = recipe.rollout
    return TrajectoryLimits(recipe.model.max_len, rollout.max_turns, rollout.max_turn_tokens)


def extras_of(recipe: Recipe) -> BatchOverhead:
    """Return an upper bound on work beside the batch, by the recipe; without filtered groups, whose
    number nobody knows.
    """
    replayed = recipe.replay.groups / recipe.training.groups_per_step if recipe.replay else 0.0
    return BatchOverhead(
        surplus=recipe.rollout.oversample / recipe.group_size,
        replayed=replayed,
    )


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
        #: All that have finished, while the first steps' worth is in flight; None after that.
        self._first: list[TrajectorySample] | None = []
        #: Those that have begun and finished since the newest step, and how many have begun.
        self._since_step: list[TrajectorySample] = []
        self._begun = 0
        #: Whether the work is to be told by what has begun since the newest step alone, since the
        #: next one is overdue: what was measured before is of other work.
        self.overdue = False
        self._in_play = InPlay()
        #: Generated tokens of the turns that have ended since the newest step.
        self._played_tokens: Tokens = 0
        self._measured: deque[MeasuredStep] = self._steps_kept()
        self._asked = AskedModels(RECENT)
        #: What is in no row; nothing where only rows are known.
        self.asked_now = AskedNow()
        self._lengths: deque[float] = deque(maxlen=RECENT)
        self._extras = _Extras()
        self._history = WorkHistory()
        self._ended_at: Seconds | None = None
        #: Since the run began, or went on.
        self._steps = 0
        self._plan = -1
        self._plan_at: Seconds = 0.0
        self._began_at: Seconds = 0.0
        self._conversations = _Conversations(newest)
        self._turns: deque[PlayedTurn] = deque(maxlen=RECENT_TURNS)
        self._training = _Training()
        self._starts = _StartTimes()
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
                self._turns.append(self._conversations.turn(record))
                self._played_tokens += record.generated_tokens
            case TrajectoryRecord():
                self._trajectory(record)
            case GroupRecord():
                self._training.group(record)
            case StepRecord() if not record.checkpoint:  # written again once it has one
                self._step(record)
            case SlotRecord() if not record.is_frozen:
                self._starts.slot(record)
                self._training.slot(record)
            case MoveRecord():
                self._starts.move(record)
                self._training.move(record)
            case _:
                self._saw_plan(record)

    def _evaluated(self, record: TurnRecord | TrajectoryRecord) -> None:
        """Take in what an evaluation plays, which asks frozen models too."""
        if isinstance(record, TrajectoryRecord) and record.state == "finished":
            self._asked.ended()

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
        since, early = self._history.since, self._early
        # What has begun in an overdue step has met today's tools already.
        factor = 1.0 if self.overdue else self._conversations.tools.factor
        done, alive = self._under_way if early else ([], [])
        newest = [*early, *done] if early else list(self._samples)
        if since is not None and not early:
            newest = newest[-since * self._recipe.trajectories_per_step :]
        ended = [replace(one, tool_s=one.tool_s * factor) for one in newest]
        samples = completed(ended, alive) if early else tuple(ended)
        extras = self._extras.mean(since or RECENT)
        work = workload_of(self._recipe, samples, extras, self._rule)
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
        if self.overdue or not training.staleness.is_chosen:
            return None
        return BoundEvidence(
            bound=self._rule.bound,
            bounds=training.bounds,
            steps=tuple(self._worths),
            aged=tuple(self._aged),
            left=dict(self._left),
        )

    def is_late(self, *, now: Seconds) -> bool:
        """Whether the step under way takes ``OVERDUE`` times as long as the longest of the newest
        ones, which are as many as overlap or more: some are very short, and some wait."""
        measured = self.measured
        if self._first is not None or self._ended_at is None or len(measured) <= self._rule.bound:
            return False
        return now - self._ended_at > OVERDUE * max(step.step_s for step in measured)

    @property
    def _early(self) -> list[TrajectorySample]:
        """The finished ones of all trajectories that began in the first steps, or in one that is
        ``overdue``; empty where the newest ones tell the work."""
        return self._since_step if self.overdue else self._first or []

    @property
    def first_ended(self) -> int:
        """Trajectories that have finished while the first steps' worth is in flight, or that have
        begun and finished in a step that is ``overdue``; 0 otherwise."""
        return len(self._early)

    @property
    def first_error(self) -> float:
        """Standard error of the turns expected then, as a share; infinite where none is known, and
        while most of those that have begun in an ``overdue`` step have not played a turn."""
        if not self._early:
            return inf
        done, alive = self._under_way
        if self.overdue and 2 * (len(self._early) + len(alive)) < self._begun:
            return inf
        ended = (one.turns for one in (*self._early, *done))
        return TurnSurvival(ended, (one.turns for one in alive)).error

    @property
    def _under_way(self) -> tuple[list[TrajectorySample], list[TrajectorySample]]:
        """The trajectories under way that have played all their turns, and others that have played
        a turn.

        The former wait for a frozen model's last answer. They are as many as ``AskedModels`` tells,
        and taken to be the first of those that wait for their environment; none where that is less
        than half of these, which may wait for tools. In a step that is ``overdue`` they are those
        that have begun in it.
        """
        now, conversations = self.asked_now, self._conversations
        begun = conversations.alive_since(self._ended_at if self.overdue else None)
        last = self._asked.last_asked(now.all_uses)
        done = dict(islice(now.asking.items(), last if 2 * last > len(now.asking) else 0))
        ended = [
            replace(one.so_far, tool_s=conversations.tool_s(who, one.queued_at))
            for who, one in done.items()
            if not is_evaluation(who[0]) and (who in begun or not self.overdue)
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
            "time in play over time on servers": self._conversations.tools.stretch,
            "tokens played for each of a batch": extras.played if extras else 1.0,
        }

    @property
    def measured(self) -> tuple[MeasuredStep, ...]:
        """The newest steps under today's plan, without the first of the run; none where the next
        one is ``overdue``."""
        if self.overdue:
            return ()
        return tuple(self._measured)[-(self._history.since or RECENT) :]

    @property
    def lengths(self) -> tuple[float, ...]:
        """Mean generated tokens of the newest steps, oldest first; none where the next one is
        ``overdue``."""
        if self.overdue:
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
            self._begun += 1
            return
        self._in_play.change(-1, now=row.ended_at)
        is_new = self._conversations.began_since(row, self._ended_at)
        sample = self._conversations.ended(row)
        if sample is not None and row.state == "finished":
            self._samples.append(sample)
            self._training.finished(row)
            self._asked.ended()
            if self._first is not None:
                self._first.append(sample)
            elif is_new:
                self._since_step.append(sample)

    def _step(self, row: StepRecord) -> None:
        began = row.started_at - row.waited_s if self._ended_at is None else self._ended_at
        self._ended_at = row.ended_at
        self._since_step.clear()
        self._begun = 0
        in_play_s, concurrency = self._in_play.take(now=row.ended_at)
        played_tokens, self._played_tokens = self._played_tokens, 0
        self._lengths.append(row.mean_length)
        extras = self._extras.step(row)
        self._training.step(row, extras.trained)
        is_planned = row.started_at >= self._plan_at
        self._asked.step(row.ended_at - began, uses_of(row.batch), is_planned=is_planned)
        self._steps += 1
        self._ages(row)
        if self._steps > self._rule.bound:
            self._first = None
            self._history.add(self._work_of(row, extras))
        settling, self._settling = self._settling, max(0, self._settling - 1)
        if settling or self._steps <= FILLING or row.started_at < self._plan_at:
            return
        # What begins together at first meets its last call in one step, as never again.
        once_s = row.held_s if self._steps <= self._rule.overlap else 0.0
        train_s = max(row.ended_at - row.started_at - row.compile_s, 1e-9)
        self._measured.append(
            MeasuredStep(
                step_s=max(row.ended_at - began - once_s - row.compile_s, 1e-9),
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
            "turn_s": self._conversations.tools.take_turn_s(),
            "played": extras.played,
        }

    def _new_plan(self, row: PlanRecord) -> None:
        self._asked.new_plan()
        if row.cause == "start":  # also of a run that goes on: nothing is in play
            self._began_at = row.at
            self._asked.begin()
            self._steps, self._ended_at = 0, None
            self._in_play.begin(now=row.at)
            self._conversations = _Conversations(self._samples.maxlen or 0)
            self._first = None if self._samples else []
        self._plan, self._plan_at = row.plan, row.at
        self._measured.clear()
        self._training.plan(row)


@dataclass(slots=True)
class _Conversation:
    """A trajectory under way: its last turn, its prompt's tokens, and what it has waited for."""

    last: TurnRecord
    prompt: Tokens
    generated: Tokens
    began_at: Seconds
    turns: int = 1
    tool_s: Seconds = 0.0

    @property
    def so_far(self) -> TrajectorySample:
        """Return the trajectory as far as it has come."""
        context = self.last.prompt_tokens + self.last.generated_tokens
        generated = max(1, self.generated)
        prompt = min(self.prompt, max(0, context - generated))
        observed = max(0, context - generated - prompt)
        return TrajectorySample(prompt, generated, observed, self.turns, self.tool_s)


class _Conversations:
    """Trajectories under way that have played a turn."""

    def __init__(self, finished: int) -> None:
        self._under_way: dict[Member, _Conversation] = {}
        self.tools = _ToolTimes(finished)

    def turn(self, row: TurnRecord) -> PlayedTurn:
        """Return the turn, with the tokens of its prompt that no cache can have held."""
        who = (row.group_id, row.member, row.attempt)
        one = self._under_way.get(who)
        cached = 0
        if one is None:
            self._under_way[who] = _Conversation(
                row, row.prompt_tokens, row.generated_tokens, min(row.queued_at, row.started_at)
            )
        else:
            before, one.last = one.last, row
            one.turns += 1
            one.generated += row.generated_tokens
            tool_s = max(0.0, row.queued_at - before.ended_at)
            one.tool_s += tool_s
            self.tools.returned(tool_s)
            if before.slot == row.slot:
                cached = before.prompt_tokens + before.generated_tokens
        self.tools.played(row.ended_at - row.queued_at)
        return played_turn(row, cached)

    def alive_since(self, at: Seconds | None) -> dict[Member, TrajectorySample]:
        """Return the trajectories under way, as far as they have come; with a time, those that
        asked for their first turn then or later."""
        return {
            who: one.so_far
            for who, one in self._under_way.items()
            if at is None or one.began_at >= at
        }

    def began_since(self, row: TrajectoryRecord, at: Seconds | None) -> bool:
        """Whether a trajectory under way asked for its first turn then or later."""
        one = self._under_way.get((row.group_id, row.member, row.attempt))
        return one is not None and at is not None and one.began_at >= at

    def tool_s(self, who: Member, queued_at: Seconds) -> Seconds:
        """Seconds that a trajectory under way has waited for tools until ``queued_at``, when its
        last turn was asked for."""
        one = self._under_way.get(who)
        return one.tool_s + max(0.0, queued_at - one.last.ended_at) if one else 0.0

    def ended(self, row: TrajectoryRecord) -> TrajectorySample | None:
        """Return the trajectory's lengths; None if it never played a turn.

        Its time in tools is from the end of a turn until the next one is asked for.
        """
        one = self._under_way.pop((row.group_id, row.member, row.attempt), None)
        if one is None or row.generated_tokens < 1:
            return None
        if row.state == "finished":
            self.tools.finished(one.tool_s, row.turns - 1)
        prompt = max(0, min(one.prompt, row.context_tokens - row.generated_tokens))
        return TrajectorySample(
            prompt=prompt,
            generated=row.generated_tokens,
            observed=max(0, row.context_tokens - row.generated_tokens - prompt),
            turns=row.turns,
            tool_s=one.tool_s + sum(call.latency_s for call in one.last.tools),
        )


class _ToolTimes:
    """The time that tools take now, and took in the newest trajectories that have ended."""

    def __init__(self, finished: int) -> None:
        self._now: deque[Seconds] = deque(maxlen=RECENT_TOOLS)
        self._on_servers: deque[Seconds] = deque(maxlen=RECENT_TOOLS)
        #: Seconds of the returns since the newest step, and their number.
        self._since_step: tuple[Seconds, int] = (0.0, 0)
        self._turn_s: Seconds = 1.0
        #: Of each trajectory: seconds in tools, and the number of their returns.
        self._finished: deque[tuple[Seconds, int]] = deque(maxlen=finished)

    def returned(self, tool_s: Seconds) -> None:
        """Add the ``tool_s`` seconds between a turn and the next one."""
        self._now.append(tool_s)
        seconds, number = self._since_step
        self._since_step = seconds + tool_s, number + 1

    def played(self, seconds: Seconds) -> None:
        """A turn has been in a queue and on a server."""
        self._on_servers.append(seconds)

    def finished(self, tool_s: Seconds, returns: int) -> None:
        """Add a trajectory that has ended, with its seconds in
        tools and its number of tool returns.
        """
        self._finished.append((tool_s, returns))

    @property
    def stretch(self) -> float:
        """Seconds in play for each one in queues and on servers."""
        if not (self._now and any(self._on_servers)):
            return 1.0
        return 1 + fmean(self._now) / fmean(self._on_servers)

    def take_turn_s(self) -> Seconds:
        """Seconds of a turn in the tool since the last call, and on servers as of late; what it was
        then if no tool has returned."""
        (seconds, number), self._since_step = self._since_step, (0.0, 0)
        if number and any(self._on_servers):
            self._turn_s = fmean(self._on_servers) + seconds / number
        return self._turn_s

    @property
    def factor(self) -> float:
        """How many times as long tools take now, as far as that is more than chance.

        A change r, a logarithm, counts with the weight r^2 / (r^2 + s^2), with s its standard error
        (Stein's estimator).
        """
        then_s = sum(tool_s for tool_s, _ in self._finished)
        if not (then_s and any(self._now)):
            return 1.0
        now, returns = fmean(self._now), sum(number for _, number in self._finished)
        variance = fmean((tool_s / now - 1) ** 2 for tool_s in self._now)
        squared_error = variance * (1 / len(self._now) + 1 / returns)
        change = log(now * returns / then_s)
        return exp(change * change**2 / (change**2 + squared_error)) if change else 1.0


class _Extras:
    """The tokens that the newest steps played and trained beside their batches."""

    def __init__(self) -> None:
        #: Of each step: tokens of its batch, filtered, surplus and replayed ones.
        self._tokens: deque[tuple[float, ...]] = deque(maxlen=RECENT)

    def step(self, row: StepRecord) -> BatchOverhead:
        """Take in a step that is done; returns its extra work."""
        self._tokens.append(_batch_tokens(row))
        return overhead_of(row)

    def mean(self, steps: int) -> BatchOverhead | None:
        """The mean of the newest steps by tokens; None before the first step."""
        newest = list(self._tokens)[-steps:]
        return _extras(tuple(map(sum, zip(*newest, strict=True)))) if newest else None


def played_turn(row: TurnRecord, cached: Tokens) -> PlayedTurn:
    """Return a turn of whose prompt its server may have had so many tokens from the one before."""
    return PlayedTurn(
        row.slot,
        row.started_at,
        row.ended_at,
        row.prompt_tokens,
        max(0, row.prompt_tokens - cached),
        row.generated_tokens,
    )


def overhead_of(row: StepRecord) -> BatchOverhead:
    """Return what a step played and trained beside its batch."""
    return _extras(_batch_tokens(row))


def _batch_tokens(row: StepRecord) -> tuple[float, ...]:
    """Return the tokens of a step's batch, and its filtered, surplus and replayed ones."""
    names = ("filtered_tokens", "surplus_tokens", "replayed_tokens")
    return (float(row.generated_tokens), *(row.batch.get(name) or 0.0 for name in names))


def _extras(tokens: tuple[float, ...]) -> BatchOverhead:
    batch, *others = tokens
    return BatchOverhead(*(other / max(1.0, batch) for other in others))


@dataclass(slots=True)
class _SteadyStep:
    """A step and what is known of it so far; its groups are told after it.

    ``trained`` is how many times the tokens of its batch it trained, replayed groups included.
    """

    number: int
    seconds: Seconds
    tokens: Tokens
    trained: float = 1.0
    pairs: float = 0.0


class _Training:
    """The newest steps under one plan with all its slots in place, and how many GPUs trained."""

    def __init__(self) -> None:
        self._pairs: dict[int, float] = {}
        self._moving: set[SlotId] = set()
        self._gpus: dict[SlotId, int] = {}
        self._slots: tuple[SlotId, ...] = ()
        #: When all slots were in place.
        self._since: Seconds = 0.0
        self._steady: deque[_SteadyStep] = deque(maxlen=RECENT_STEPS)
        self._before: tuple[tuple[TrainedStep, ...], tuple[SlotId, ...]] = ((), ())

    @property
    def steps(self) -> tuple[TrainedStep, ...]:
        """The steps under the newest plan that has enough of them."""
        return self._trained if self._is_enough else self._before[0]

    @property
    def ranks(self) -> int:
        """GPUs that trained in these steps; a slot without GPUs counts as one."""
        slots = self._slots if self._is_enough else self._before[1]
        return max(1, sum(self._gpus.get(slot, 1) for slot in slots))

    @property
    def _trained(self) -> tuple[TrainedStep, ...]:
        return tuple(
            TrainedStep(step.seconds, step.trained * step.tokens, step.trained * step.pairs)
            for step in self._steady
        )

    @property
    def _is_enough(self) -> bool:
        return len(self._steady) >= LEAST_STEPS or not self._before[0]

    def slot(self, row: SlotRecord) -> None:
        """Remember the number of the slot's GPUs."""
        if row.slot not in self._gpus:
            self._gpus[row.slot] = len(row.gpus) or 1

    def plan(self, row: PlanRecord) -> None:
        """Begin with a new plan; the one before is used until this one has steps of its own."""
        if len(self._steady) >= LEAST_STEPS:
            self._before = self._trained, self._slots
        self._steady.clear()
        self._moving.clear()
        self._slots = (*row.train, *row.gradient)
        self._since = row.at

    def move(self, row: MoveRecord) -> None:
        """Note that a slot is on its way, or has arrived."""
        if row.ended_at is None:
            self._moving.add(row.slot)
        else:
            self._moving.discard(row.slot)
            self._since = max(self._since, row.ended_at)

    def finished(self, row: TrajectoryRecord) -> None:
        """A trajectory that its group may be trained with."""
        pairs = row.context_tokens**2 / 2
        self._pairs[row.group_id] = self._pairs.get(row.group_id, 0.0) + pairs

    def group(self, row: GroupRecord) -> None:
        """Add the tokens' pairs of a trained group to its step;
        those of a dropped one are forgotten.
        """
        if row.state in ("open", "ready", "claimed"):
            return
        pairs = self._pairs.pop(row.group_id, 0.0)
        for step in reversed(self._steady):
            if row.state == "trained" and step.number == row.step:
                step.pairs += pairs
                return

    def step(self, row: StepRecord, trained: float) -> None:
        """Take in an optimizer step, which counts if all slots were in place throughout."""
        if self._moving or row.started_at < self._since:
            return
        seconds = max(row.ended_at - row.started_at - row.compile_s, 1e-9)
        self._steady.append(_SteadyStep(row.step, seconds, row.context_tokens, trained))


class _StartTimes:
    """Seconds until servers and trainers were ready, and in which slots that moved did nothing."""

    def __init__(self) -> None:
        self._began: dict[SlotId, Seconds] = {}
        self._waits: dict[str, _MeanOrNone] = {"serving": _MeanOrNone(), "training": _MeanOrNone()}
        self._idle: dict[tuple[str, str], _MeanOrNone] = {}

    def slot(self, row: SlotRecord) -> None:
        """Take in a slot's row; from ``starting`` until it serves or trains is its start."""
        if row.state == "starting":
            self._began[row.slot] = row.since
        elif row.state == "waking":  # which is no start
            self._began.pop(row.slot, None)
        elif row.state in self._waits and row.slot in self._began:
            self._waits[row.state].add(row.since - self._began.pop(row.slot))

    def move(self, row: MoveRecord) -> None:
        """Take in a move; where the next process started beside the old one the slot was idle in
        the stop only.
        """
        if row.state != "done":
            return
        overlapped = row.phases[0].phase == "start"
        counted = ("stop",) if overlapped else ("drain", "stop", "start", "sync", "verify")
        idle_s = sum(
            one.ended_at - one.started_at
            for one in row.phases
            if one.phase in counted and one.ended_at is not None
        )
        self._idle.setdefault((row.from_role, row.to_role), _MeanOrNone()).add(idle_s)

    def seen(self) -> Starts:
        """Return the means of the starts so far."""
        return Starts(
            self._waits["serving"].value,
            self._waits["training"].value,
            to_training_s=self._of("rollout", "gradient"),
            to_rollout_s=self._of("gradient", "rollout"),
        )

    def _of(self, before: str, after: str) -> Seconds | None:
        mean = self._idle.get((before, after))
        return mean.value if mean else None


class _MeanOrNone:
    """A running mean; None before the first value."""

    def __init__(self) -> None:
        self._sum, self._number = 0.0, 0

    def add(self, value: float) -> None:
        self._sum, self._number = self._sum + value, self._number + 1

    @property
    def value(self) -> float | None:
        return self._sum / self._number if self._number else None
