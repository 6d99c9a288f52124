"""The prices that a run itself has shown, by all of it; its planner knew the newest part alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from libra_cli.config.recipe import NodeSpec
from libra_cli.core.costs.hindsight import (
    SharedStep,
    TrainedSpan,
    TrainingHindsight,
    busy_between,
    server_hindsight,
    slowdown_of,
    training_hindsight,
)
from libra_cli.core.costs.profile import Profile
from libra_cli.core.costs.server import guessed_cost
from libra_cli.core.evidence import PlayedTurn
from libra_cli.core.observed.step_work import overhead_of
from libra_cli.core.observed.under_way import played_turn
from libra_cli.core.planning.controller import plan_of_record
from libra_cli.core.records import MoveRecord, StepRecord, TurnRecord
from libra_cli.core.types import Plan, Seconds
from libra_cli.runtime.store.reader import Reader

CROWDED = 0.33
"""Share by which each further rank slows the others, where slots overlap on their host's cores and
a run has trained with one number of ranks alone: measured on two cores that the three slots of the
elastic recipe shared. Between 0 and 1, with which a second rank gains nothing, it is open."""
MOST_TURNS, WINDOWS = 20_000, 20
"""Turns that prices are taken from at most, and the times of a longer run that they are of."""


def hindsight(
    reader: Reader, nodes: Sequence[NodeSpec], profile: Profile, plans: Sequence[Plan], part: float
) -> tuple[Profile, ...]:
    """The profile with the prices that the run has shown, and the two between which it cannot tell:
    the cheapest and the dearest at a low load.

    Servers are those of ``plans``, by all their turns, whatever they were for. Slots without GPUs
    share the cores of their host. Gradient workers share this ``part`` of a step's computing.
    """
    shared = not any(node.gpus for node in nodes)
    buckets = {slot: bucket for plan in plans for slot, bucket in plan.servers}
    degrees = {bucket.tensor_parallel: bucket for bucket in buckets.values()}
    turns = [turn for turn in _turns_of(reader) if turn.slot in buckets]
    steps = reader.steps() if shared else []
    spans = [TrainedSpan(step.started_at, step.ended_at, step.train_share) for step in steps]
    found = {
        degree: server_hindsight(
            [turn for turn in turns if buckets[turn.slot].tensor_parallel == degree],
            spans,
            guessed_cost(bucket),
        )
        for degree, bucket in degrees.items()
    }
    laws = (
        {degree: one.law for degree, one in found.items()},
        {degree: one.least for degree, one in found.items()},
        {degree: one.most for degree, one in found.items()},
    )
    if not shared:
        return tuple(replace(profile, servers=one) for one in laws)
    beside = max((one.beside for one in found.values()), default=0.0)
    taken = list(_shared_steps(reader, steps, busy_between(turns, spans), part))
    # A server that the trainer slows slows the trainer too, by as much at most.
    crowded = CROWDED if _overlap(reader, nodes) else 0.0
    guesses = (beside / 2, crowded), (beside, 0.0), (0.0, float(crowded > 0))
    return tuple(
        _shared(replace(profile, servers=one), beside, training_hindsight(taken, *guess))
        for one, guess in zip(laws, guesses, strict=True)
    )


def _overlap(reader: Reader, nodes: Sequence[NodeSpec]) -> bool:
    """Whether a host has fewer cores than its slots need, so that ranks wait for one another."""
    cpus = {row.node: row.facts.get("cpus") for row in reader.nodes()}
    return any(node.num_slots * (node.cores or 1) > (cpus.get(node.name) or inf) for node in nodes)


def _shared(profile: Profile, beside: float, training: TrainingHindsight) -> Profile:
    around = replace(
        profile.surroundings,
        serving_slowdown=slowdown_of(beside),
        training_slowdown=training.slowdown,
        rank_slowdown=training.rank_slowdown,
    )
    prices = replace(profile.training, step_s=training.step_s, token_s=training.token_s, pair_s=0.0)
    return replace(profile, training=prices, surroundings=around)


def _shared_steps(
    reader: Reader, steps: Sequence[StepRecord], busy: Sequence[Seconds], part: float
) -> Iterator[SharedStep]:
    """Yield the steps, with all that they trained; servers were ``busy`` beside each for so long,
    and workers share this ``part`` of one."""
    plans, moves = reader.plans(), [move for move in reader.moves() if move.state == "done"]
    adopted = [row.at for row in plans]
    for step, beside_s in zip(steps, busy, strict=True):
        seconds = step.train_s - step.compile_s
        if seconds <= 0:
            continue
        plan = plan_of_record(plans[max(0, bisect_right(adopted, step.started_at) - 1)])
        tokens = step.context_tokens * overhead_of(step).trained
        yield SharedStep(seconds, tokens, _ranks(plan, moves, step, part), beside_s)


def _ranks(plan: Plan, moves: Sequence[MoveRecord], step: StepRecord, part: float) -> float:
    """Return as how many slots of the base group those that trained a step count: gradient workers
    only from when they had arrived, and in their ``part`` of a step."""
    arriving = {
        move.slot
        for move in moves
        if move.started_at <= step.started_at < (move.ended_at or move.started_at)
    }
    base = len(plan.train)
    if not base:
        return 1.0
    all_of_them = base + sum(slot not in arriving for slot in plan.gradient)
    return 1 / (part / all_of_them + (1 - part) / base)


def _turns_of(reader: Reader) -> Iterator[PlayedTurn]:
    """The turns of a run, of a long one those in ``WINDOWS`` times evenly over it, and what no
    cache can have held of their prompts."""
    steps, turns = reader.steps(), reader.turn_count()
    began, ended = reader.run().started_at, steps[-1].ended_at
    many = WINDOWS if turns > MOST_TURNS else 1
    gap_s = (ended - began) / many
    long_s = gap_s * min(1.0, MOST_TURNS / turns)
    places = [
        began + number * (ended - began - long_s) / max(1, many - 1) for number in range(many)
    ]
    before: dict[tuple[int, int, int], TurnRecord] = {}
    for begin in places:
        rows = reader.turns_between(begin, begin + long_s)
        for row in sorted(rows, key=lambda row: row.ended_at):
            who = row.group_id, row.member, row.attempt
            last, before[who] = before.get(who), row
            here = last is not None and last.slot == row.slot
            cached = last.prompt_tokens + last.generated_tokens if last and here else 0
            yield played_turn(row, cached)
