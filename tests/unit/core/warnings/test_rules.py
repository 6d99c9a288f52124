"""Every rule: a series that it must warn of, and one that is nearly so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import pytest

from libra_cli.core.warnings.gaps import ExpectedGap
from libra_cli.core.warnings.rules import LONGEST, RULES, RuleBounds
from libra_cli.core.warnings.series import FIRST_GAP, Numbers

Course = Callable[[int], float]
"""A number by how many steps ago it was."""
STEPS = 50
BOUNDS = RuleBounds(max_grad_norm=1.0, gap=ExpectedGap(usual=0.008, wrong=0.05))


def said(rule: str, courses: Mapping[str, Course]) -> str:
    """What the rule says of numbers that follow these courses but for a little noise."""
    rng = random.Random(7)

    def at(ago: int) -> Numbers:
        return {name: rng.gauss(1.0, 0.01) * course(ago) for name, course in courses.items()}

    series = [at(ago) for ago in reversed(range(STEPS))]
    assert len(series) <= LONGEST
    return RULES[rule](series, BOUNDS)


def flat(value: float) -> Course:
    return lambda ago: value


def last(steps: int, value: float, before: float) -> Course:
    return lambda ago: value if ago < steps else before


CASES: dict[str, tuple[dict[str, Course], dict[str, Course]]] = {
    "entropy": (
        {"entropy": last(10, 0.2, 0.5), "reward": last(10, 0.5, 0.7)},
        {"entropy": last(10, 0.2, 0.5), "reward": last(10, 0.7, 0.5)},
    ),
    "reward": (
        {"reward": last(10, 0.4, 0.8)},
        {"reward": last(10, 0.6, 0.8)},
    ),
    "off-policy": (
        {"rollout_kl": last(5, 0.15, 0.01)},
        {"rollout_kl": last(4, 0.15, 0.01)},
    ),
    "effective-samples": (
        {"effective_sample_size": last(5, 0.2, 0.9)},
        {"effective_sample_size": last(5, 0.35, 0.9)},
    ),
    "no-signal": (
        {"share_without_signal": last(20, 0.85, 0.2), "reward": flat(0.9)},
        {"share_without_signal": last(20, 0.75, 0.2), "reward": flat(0.9)},
    ),
    "truncated": (
        {"share_truncated": last(10, 0.6, 0.1)},
        {"share_truncated": last(10, 0.4, 0.1)},
    ),
    "gradient": (
        {"grad_norm": last(10, 1.5, 0.5)},
        {"grad_norm": last(9, 1.5, 0.5)},
    ),
    "repetition": (
        {"share_repeated": last(10, 0.3, 0.05)},
        {"share_repeated": last(10, 0.15, 0.05)},
    ),
    "length": (
        {
            "mean_length": last(20, 600.0, 300.0),
            "reward": last(20, 0.6, 0.4),
            "reward_length_correlation": flat(0.7),
        },
        {
            "mean_length": last(20, 600.0, 300.0),
            "reward": last(20, 0.6, 0.4),
            "reward_length_correlation": flat(0.1),
        },
    ),
    "tool-format": (
        {"share_unreadable": last(10, 0.4, 0.0)},
        {"share_unreadable": last(10, 0.1, 0.0)},
    ),
    "logprob-gap": (
        {"logprob_gap": last(10, 0.06, 0.02)},
        {"logprob_gap": last(10, 0.04, 0.02)},
    ),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_says_what_is_wrong_and_what_to_do(rule: str) -> None:
    text = said(rule, CASES[rule][0])
    assert text
    assert not text.endswith(".")
    assert any(mark in text for mark in ("lower ", "raise ", "set ", "look ", "see "))


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_is_silent_about_what_is_nearly_so(rule: str) -> None:
    assert said(rule, CASES[rule][1]) == ""


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_is_silent_about_numbers_nobody_knows_and_about_few_steps(rule: str) -> None:
    assert RULES[rule]([], BOUNDS) == ""
    assert RULES[rule]([{}] * STEPS, BOUNDS) == ""
    newest = {name: course(0) for name, course in CASES[rule][0].items()}
    assert RULES[rule]([newest], BOUNDS) == ""


def test_a_gradient_that_is_clipped_and_comes_down_is_no_warning() -> None:
    assert said("gradient", {"grad_norm": lambda ago: 1.2 * 1.06**ago}) == ""
    assert said("gradient", {"grad_norm": flat(1.2)})


def test_noise_alone_is_no_warning() -> None:
    wrong = [rule for seed in range(100) for rule in _of_noise(seed)]
    assert not wrong


def _of_noise(seed: int) -> Iterator[str]:
    """The rules that warn of a run that learns a little, in which each step has noise."""
    rng = random.Random(seed)
    series = [
        {
            "reward": min(1.0, max(0.0, rng.gauss(0.4 + step / 200, 0.1))),
            "mean_length": rng.gauss(100.0 + step, 15.0),
            "entropy": rng.gauss(0.5 - step / 200, 0.05),
            "grad_norm": rng.uniform(0.2, 1.4),
            "share_without_signal": rng.uniform(0.2, 0.8),
            "share_repeated": rng.uniform(0.0, 0.1),
            "reward_length_correlation": rng.gauss(0.2, 0.2),
            "logprob_gap": rng.lognormvariate(-4.3, 0.5),
            FIRST_GAP: 0.014,
        }
        for step in range(LONGEST)
    ]
    return (rule for rule, check in RULES.items() if check(series, BOUNDS))


COLLAPSED = [(0.289, 0.1875), (0.3115, 0.1875), (0.0075, 1.0), *[(0.0, 1.0)] * 22]
"""Reward and share of groups without signal of a real run, at 20 times its learning rate."""


def collapse(steps: list[tuple[float, float]], rule: str = "reward") -> str:
    series = [{"reward": reward, "share_without_signal": share} for reward, share in steps]
    return RULES[rule](series, BOUNDS)


def test_a_policy_that_collapsed_in_its_first_steps_is_told_as_such() -> None:
    assert collapse(COLLAPSED[:11]) == ""
    said = collapse(COLLAPSED[:12])
    assert "the policy has collapsed" in said
    assert "last 10 steps, whose reward is 0.00075 and was 0.311" in said
    assert "training.learning_rate" in said
    assert "last 23 steps, whose reward is 0 and was 0.311" in collapse(COLLAPSED)
    assert collapse(COLLAPSED, "no-signal") == "", "it is told once, and tasks are not the reason"


def test_a_policy_that_solves_all_or_never_earned_anything_has_not_collapsed() -> None:
    assert collapse([(0.3, 0.2)] * 5 + [(1.0, 1.0)] * 10) == ""
    assert collapse([(0.0, 1.0)] * 15) == ""
    assert collapse([(0.3, 0.2)] * 5 + [(0.0, 1.0)] * 9 + [(0.1, 0.9)]) == ""
