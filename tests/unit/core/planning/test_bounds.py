"""Which staleness bound is chosen: by seconds a step, what old tokens are worth, and how sure that
is."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.training import AUTO_BOUNDS
from libra_cli.core.bound_choice import BoundChoice
from libra_cli.core.costs.profile import Profile
from libra_cli.core.evidence import Recalibration
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.observation import Observation
from libra_cli.core.observed.step_work import workload_of
from libra_cli.core.planning.bounds import LEAST, chosen_bound, priced_bound
from libra_cli.core.planning.planner import Decision, Planner
from libra_cli.core.planning.recipe_placement import RecipePlacement
from libra_cli.core.planning.search import PlannerSettings
from libra_cli.core.token_worth import (
    DECAY,
    SPREAD,
    AgeWorth,
    BoundEvidence,
    StepWorth,
    step_worth,
)
from libra_cli.core.warnings.rules import ROLLOUT_KL
from libra_cli.core.workload import TrajectorySample
from libra_cli.sim.profiles import load_profile
from tests.unit.core.planning.test_explanation import RECIPE

PROFILE: Profile = load_profile("a800-qwen3-8b")


def step(decay: float, mean_age: int = 1, kl: float = 0.0) -> StepWorth:
    """A step whose tokens are a version younger, as old, and a version older than that; ``kl`` is
    nats a version."""
    ages = [(mean_age - 1, 200), (mean_age, 600), (mean_age + 1, 200)]
    return StepWorth(tuple(AgeWorth(age, n, exp(-decay * age), kl * age) for age, n in ages))


def evidence(*steps: StepWorth, bound: int = 1) -> BoundEvidence:
    aged = tuple(one for one in steps if one.information)
    return BoundEvidence(bound, AUTO_BOUNDS, steps, aged)


def choose(known: BoundEvidence, **seconds: float) -> BoundChoice:
    """Among bounds with these seconds a step, as ``b2=90``."""
    steps = {int(name[1:]): step_s for name, step_s in seconds.items()}
    priced = {bound: priced_bound(known, bound, "", step_s) for bound, step_s in steps.items()}
    return chosen_bound(known, priced, 0.05)


def test_a_step_tells_the_worth_of_each_age_and_an_older_librarys_tells_nothing() -> None:
    told = {
        "staleness/age_0_tokens": 100.0,
        "staleness/age_0_worth": 1.0,
        "staleness/age_2_tokens": 300.0,
        "staleness/age_2_worth": exp(-0.4),
        "staleness/age_2_kl": 0.2,
    }
    seen = step_worth(told)
    assert seen is not None
    assert (seen.tokens, seen.mean_age) == (400, 1.5)
    assert seen.mean_kl == pytest.approx(0.15)
    assert (seen.decay(0.0), seen.kl_a_version(0.0)) == pytest.approx((0.2, 0.1))
    assert (seen.decay(0.1), seen.kl_a_version(0.02)) == pytest.approx((0.15, 0.09))
    assert step_worth({"reward": 1.0}) is None


def test_before_a_step_has_told_of_old_tokens_the_decay_is_what_other_runs_had() -> None:
    of_one_age = StepWorth((AgeWorth(0, 100, 1.0),))
    for known in (evidence(), evidence(of_one_age, bound=0)):
        assert (known.decay.mean, known.decay.error) == (DECAY, SPREAD)


@given(decay=st.floats(0, 0.5), steps=st.integers(5, 20), noise=st.floats(0, 0.1))
def test_the_decay_is_found_and_scatter_makes_it_less_sure(decay, steps, noise):
    alike = evidence(*[step(decay)] * steps).decay
    assert alike.mean == pytest.approx((DECAY + steps * decay) / (steps + 1), abs=1e-9)
    scattered = [step(decay + noise * (-1) ** place) for place in range(steps)]
    assert evidence(*scattered).decay.error >= alike.error - 1e-9


def test_nothing_is_chosen_before_enough_steps_have_told() -> None:
    known = [step(0.01)] * (LEAST - 1)
    assert not choose(evidence(*known), b0=200, b1=100, b2=50).changes
    assert choose(evidence(*known, step(0.01)), b0=200, b1=100, b2=50).chosen.bound == 2


def test_a_bound_rises_by_a_notch_at_most() -> None:
    for bound, most in zip(AUTO_BOUNDS, (1, 2, 4, 4), strict=True):
        assert max(evidence(bound=bound).candidates) == most


def test_seconds_are_weighed_with_what_a_token_is_worth() -> None:
    cheap, dear = ([step(decay)] * 10 for decay in (0.01, 0.3))
    assert choose(evidence(*cheap), b0=150, b1=100, b2=80).chosen.bound == 2
    assert choose(evidence(*dear), b0=150, b1=100, b2=80).chosen.bound == 1
    assert choose(evidence(*dear), b0=105, b1=100, b2=80).chosen.bound == 0


def test_a_gain_that_is_not_sure_is_not_had() -> None:
    sure = [step(0.05)] * 8
    unsure = [step(0.0), step(0.1)] * 4
    assert evidence(*sure).decay.mean == pytest.approx(evidence(*unsure).decay.mean, abs=0.001)
    assert choose(evidence(*sure), b1=100, b2=89.2).changes
    kept = choose(evidence(*unsure), b1=100, b2=89.2)
    assert not kept.changes
    assert "below 5%" in kept.why


def test_a_bound_that_has_not_gained_what_it_promised_is_left_again() -> None:
    risen = replace(evidence(*[step(0.01)] * 5, bound=2), left={1: Recalibration()})
    back = choose(risen, b0=200, b1=100, b2=98, b4=97)
    assert back.chosen.bound == 1
    assert back.why == "+1.0% less time came than under bound 1, below 5%"
    assert choose(risen, b0=200, b1=100, b2=90, b4=89).chosen.bound == 2
    assert choose(replace(risen, left={}), b0=200, b1=100, b2=98, b4=97).chosen.bound == 2


def test_a_bound_that_was_left_has_to_promise_twice_as_much() -> None:
    known = evidence(*[step(0.01)] * 20)
    assert choose(known, b1=100, b2=91).changes
    again = replace(known, left={2: Recalibration()})
    assert not choose(again, b1=100, b2=91).changes
    assert choose(again, b1=100, b2=85).changes


def test_a_policy_too_far_off_lowers_the_bound_at_any_price() -> None:
    known = evidence(*[step(0.0, 2, kl=0.55 * ROLLOUT_KL)] * 5, bound=2)
    lowered = choose(known, b0=900, b1=500, b2=100, b4=10)
    assert lowered.chosen.bound == 1
    assert "0.11 nats a token of rollout_kl" in lowered.why


def test_no_bound_is_forced_to_where_the_halves_take_turns() -> None:
    known = evidence(*[step(0.0, 1, kl=3 * ROLLOUT_KL)] * 5, bound=1)
    assert choose(known, b0=200, b1=100, b2=10).chosen.bound == 1
    assert choose(known, b0=80, b1=100, b2=10).chosen.bound == 0


def test_what_servers_compute_differently_is_no_reason_to_lower_the_bound() -> None:
    ages = ((0, 10), (1, 200), (2, 600), (3, 200))
    gap = StepWorth(tuple(AgeWorth(age, n, 0.2, 3 * ROLLOUT_KL) for age, n in ages))
    known = evidence(*[gap] * 5, bound=2)
    assert choose(known, b0=900, b1=500, b2=100, b4=100).chosen.bound == 2


def test_at_a_bound_of_0_what_was_learned_of_older_tokens_stands() -> None:
    fresh = StepWorth((AgeWorth(0, 1000, 1.0),))
    known = BoundEvidence(0, AUTO_BOUNDS, (fresh,) * 5, (step(0.4, kl=0.2),) * 5)
    assert not choose(known, b0=100, b1=30).changes
    assert choose(replace(known, aged=()), b0=100, b1=30).changes


def test_a_bound_does_not_rise_to_where_the_policy_is_expected_too_far_off() -> None:
    near, far = ([step(0.0, kl=share * ROLLOUT_KL)] * 5 for share in (0.4, 0.6))
    assert choose(evidence(*near), b1=100, b2=10).changes
    kept = choose(evidence(*far), b1=100, b2=10)
    assert not kept.changes
    assert "rollout_kl" in kept.why


@given(
    decay=st.floats(0, 0.4),
    kl=st.floats(0, 0.3),
    bound=st.sampled_from(AUTO_BOUNDS),
    seconds=st.lists(st.floats(1, 1000), min_size=4, max_size=4),
)
def test_a_change_promises_a_gain_or_is_a_notch_down(decay, kl, bound, seconds):
    known = evidence(*[step(decay, max(1, bound), kl)] * 5, bound=bound)
    priced = {
        one: priced_bound(known, one, "", step_s)
        for one, step_s in zip(AUTO_BOUNDS, seconds, strict=True)
        if one in known.candidates
    }
    choice = chosen_bound(known, priced, 0.05)
    if choice.chosen.bound > bound:
        assert choice.chosen.bound == known.candidates[-1]
        assert known.kl_of_age(choice.chosen.bound) <= ROLLOUT_KL
    if choice.changes and not choice.why.startswith("age"):
        assert choice.chosen.step_s / choice.chosen.low <= 0.95 * choice.today.effective_s


# -- with prices -----------------------------------------------------------------------------------


def decide(known: BoundEvidence | None, tool_s: float) -> Decision:
    """Six slots of four GPUs whose trajectories are this long in tools."""
    planner = Planner(
        RecipePlacement(RECIPE), lambda plan, evidence: PROFILE, PlannerSettings(max_num_seqs=64)
    )
    samples = tuple(TrajectorySample(500, 200 + 40 * n, 300, 10, tool_s) for n in range(32))
    now = Observation(4, initial_plan(RECIPE), slots_of(RECIPE), workload_of(RECIPE, samples))
    return planner.decide(replace(now, staleness=known))


def test_every_bound_has_its_own_best_split() -> None:
    decision = decide(evidence(*[step(0.01)] * 5), tool_s=300.0)
    assert [one.bound for one in decision.bounds] == [0, 1, 2, 4]
    seconds = [one.step_s for one in decision.bounds]
    assert seconds == sorted(seconds, reverse=True), "long tools: more in flight is quicker"
    assert decision.explanation is not None
    assert decision.explanation.bound is not None
    assert decision.explanation.bound.chosen.bound == 2


def test_a_bound_that_was_left_is_priced_by_what_was_measured_under_it() -> None:
    known = evidence(*[step(0.01)] * 5, bound=2)
    measured = replace(known, left={1: Recalibration(rollout=0.5, training=0.5)})
    alike, faster = (
        {one.bound: one.step_s for one in decide(each, tool_s=3.0).bounds}
        for each in (known, measured)
    )
    assert faster[1] < 0.9 * alike[1]
    assert {**faster, 1: 0.0} == {**alike, 1: 0.0}


def test_where_the_recipe_fixes_the_bound_nothing_is_said_of_it() -> None:
    decision = decide(None, tool_s=300.0)
    assert decision.bounds == ()
    assert decision.explanation is not None
    assert decision.explanation.bound is None
