"""A planner's decision in a few lines, in ``libra status`` and ``libra rebalance --dry-run``, and
in one, while ``libra run`` goes on."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, isinf
from typing import TypeAlias

from libra_cli.core.bound_choice import BoundChoice, PricedBound
from libra_cli.core.explanation import Explanation
from libra_cli.core.records import DecisionRecord

Fact: TypeAlias = tuple[str, str]
"""A name, and what there is to say."""


def decision_facts(decision: DecisionRecord) -> Iterator[Fact]:
    """What was decided and why, what was expected, and what came."""
    told = decision.explanation
    moved = decision.plan is not None
    outcome = f"plan {decision.plan}" if moved else f"stay: {decision.why_not}"
    yield "decision", f"after step {decision.step} ({decision.why}): {outcome}"
    if told is None:
        return
    came, steps = decision.observed_s, decision.observed_steps
    (name, predicted), *others = explanation_facts(told)
    if came is not None:
        predicted += f"; came: {seconds(came)} over {steps} step{'s' * (steps != 1)}"
    yield name, predicted
    yield from others
    if told.move:
        yield "moves", _pays(told)


def explanation_facts(told: Explanation) -> Iterator[Fact]:
    """Yield the predicted seconds of a step, the constraint that binds, and the runner-up."""
    step, today = told.predicted, told.today.step_s
    interval = f"{number(step.low_s)} to {seconds(step.high_s)}"
    before = f", {seconds(today)} before" if told.move else ""
    text = f"{seconds(step.step_s)} a step{before}, likely {interval}"
    yield "predicted", f"{text} (by {step.source})"
    binds, bound = told.binds, told.binds_today.constraint
    other = "" if not told.move or bound == binds.constraint else f"; before, {bound}"
    yield "binds", f"{binds.words}{other}"
    if told.shapes:
        yield "shapes", told.shapes
    if told.bound is not None:
        yield "staleness", _bound(told.bound)
    second = told.runner_up
    if second is not None:
        option = second.option
        took = f", {seconds(option.step_s)} a step" if isfinite(option.step_s) else ""
        yield "runner-up", f"{option.layout}{took}: {second.why_not}"


def decision_line(row: DecisionRecord) -> str:
    """After which step, what, a step as it is predicted and as it came, and why: in the order of
    what a narrow terminal may cut off last."""
    told = row.explanation
    parts = [f"step {row.step}: {'stay' if row.plan is None else f'plan {row.plan}'}"]
    choice = told.bound if told else None
    if choice is not None and choice.changes:
        parts.append(f"bound {choice.today.bound} to {choice.chosen.bound}")
    if told is not None:
        parts.append(f"{seconds(told.predicted.step_s)} a step predicted")
    if row.observed_s is not None:
        parts.append(f"{seconds(row.observed_s)} came")
    why = "; ".join(filter(None, (row.why_not, row.why)))
    return f"{', '.join(parts)} ({why})"


def _bound(choice: BoundChoice) -> str:
    """The staleness bound from here on, with what it promises, and why."""
    today, chosen = choice.today, choice.chosen
    text = (
        f"bound {chosen.bound}, {seconds(chosen.step_s)} a step, a token is worth {worth(chosen)}"
    )
    if choice.changes:
        before = f"{today.bound}, {seconds(today.step_s)} and {worth(today)}"
        text += f", in place of {before}"
    return f"{text} ({choice.why})"


def worth(one: PricedBound) -> str:
    """The share that a token is worth under a bound, with its interval."""
    interval = "" if one.low == one.high else f" ({one.low:.0%} to {one.high:.0%})"
    return f"{one.worth:.0%}{interval}"


def _pays(told: Explanation) -> str:
    cost = f"cost {seconds(told.cost_s)} of the whole job"
    if told.payback_steps is None:
        return cost
    horizon = "" if isinf(told.horizon_steps) else f", of {told.horizon_steps:,.0f}"
    return f"{cost}, paid back in {told.payback_steps:,.1f} steps{horizon} to count on"


def seconds(value: float | None) -> str:
    """Seconds with three digits; a dash where they are not known."""
    return f"{number(value)} s" if value is not None and isfinite(value) else "–"


def number(value: float | None) -> str:
    """Three digits; a dash where it is not known."""
    if value is None or not isfinite(value):
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
