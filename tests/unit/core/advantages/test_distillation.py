"""The advantages that a teacher gives, against a calculation by hand."""

from __future__ import annotations

from array import array
from math import log

import pytest

from libra_cli.config.environment import TeacherSpec
from libra_cli.core.actions import TrainSample
from libra_cli.core.algorithms.distill import (
    MOST_NATS,
    distillation_metrics,
    taught_advantages,
    token_runs,
)
from libra_cli.core.types import Branch, Trajectory, TrajectoryId, VersionSpan


def spec(**keys: float) -> TeacherSpec:
    return TeacherSpec.model_validate({"url": "http://teacher:8000/v1", **keys})


def branch() -> Branch:
    """A prompt of two tokens, two generated ones, a tool's, and one more generated."""
    policy = [0.0, 0.0, log(0.5), log(0.2), 0.0, log(0.9)]
    teacher = [0.0, 0.0, log(0.25), log(0.8), 0.0, log(0.9)]
    return Branch(
        token_ids=array("i", range(6)),
        logprobs=array("f", policy),
        loss_mask=array("b", [0, 0, 1, 1, 0, 1]),
        spans=[VersionSpan(0, 2, 4), VersionSpan(0, 5, 6)],
        teacher=array("f", teacher),
    )


def test_a_token_that_the_teacher_finds_likelier_is_reinforced():
    found = taught_advantages(branch(), [(0, 5.0)], spec())
    assert list(found) == pytest.approx([0, 0, -log(2), log(4), 0, 0], abs=1e-6)


def test_a_token_that_the_teacher_finds_impossible_is_not_all_of_a_step():
    tokens = branch()
    tokens.teacher[2] = -9999.0
    assert taught_advantages(tokens, [(0, 0.0)], spec())[2] == -MOST_NATS


def test_the_reward_has_a_part_by_its_coefficient():
    found = taught_advantages(
        branch(), [(2, 3.0), (5, -1.0)], spec(kl_coef=2.0, advantage_coef=0.1)
    )
    assert list(found) == pytest.approx([0, 0, -2 * log(2) + 0.3, 2 * log(4) + 0.3, 0, -0.1])


def test_a_branch_without_a_generated_token_has_no_advantage():
    empty = Branch(token_ids=array("i", [1, 2]), logprobs=array("f", [0.0, 0.0]))
    assert list(taught_advantages(empty, [(0, 1.0)], spec())) == [0.0, 0.0]


def test_the_reverse_kl_is_a_mean_over_generated_tokens():
    tokens = branch()
    trajectory = Trajectory(
        id=TrajectoryId(0, 0),
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        loss_mask=tokens.loss_mask,
        spans=tokens.spans,
        teacher=tokens.teacher,
    )
    by_token = taught_advantages(trajectory, [], spec(kl_coef=3.0))
    sample = TrainSample(trajectory, 0, True, (), None, by_token)
    told = distillation_metrics([sample])
    values = [log(2), -log(4), 0.0]
    mean = sum(values) / 3
    assert told["reverse_kl"] == pytest.approx(mean)
    spread = (sum((value - mean) ** 2 for value in values) / 3) ** 0.5
    assert told["advantage_std"] == pytest.approx(3 * spread)
    assert distillation_metrics([]) == {"reverse_kl": None, "advantage_std": None}


def test_advantages_are_told_where_they_change():
    assert token_runs(array("f", [0, 0, 0.5, 0.5, 0, -1.25])) == [(2, 0.5), (4, 0.0), (5, -1.25)]
