"""The rules between the keys of a recipe that follow from what its algorithm needs.

Those of one algorithm alone are in its own file.
"""

from __future__ import annotations

from collections.abc import Iterator

from libra_cli.config.algorithms import LOSSES, Needs, advantages_with, controllers_beside
from libra_cli.config.problems import Problem
from libra_cli.config.recipe import Recipe
from libra_cli.config.training import TrainingSpec
from libra_cli.core.algorithms.algorithm import Find, algorithm_of
from libra_cli.core.algorithms.replay import replay_problems


def algorithm_problems(recipe: Recipe, find: Find) -> Iterator[Problem]:
    """Yield the rules about advantage, loss, teacher, demonstrations and replay that are broken.

    Raises:
        PluginError: there is no such estimator; by ``find``.
    """
    rules, training = algorithm_of(recipe, find).advantage.problems, recipe.training
    given = Needs(teacher=recipe.teacher is not None, offline=bool(recipe.demonstrations))
    yield from _need_problems(training, given, recipe.rollout.group_size)
    if rules is not None and not given.offline:
        yield from rules(recipe)
    for path in controllers_beside(training.loss, given):
        yield from find(LOSSES, path)(recipe).problems()
    if recipe.replay is not None:
        yield from replay_problems(recipe.replay, training.staleness)


def _need_problems(training: TrainingSpec, given: Needs, group_size: int) -> Iterator[Problem]:
    """Yield what an algorithm lacks, and what it has no use for; ``given`` are the needs that
    sections of the recipe are for.
    """
    yield from _demonstration_problems(training, given=given.offline)
    yield from _batch_problems(training)
    yield from _turn_problems(training)
    yield from _kl_problems(training)
    if given.offline:
        return
    yield from _teacher_problems(training, given=given.teacher)
    if training.needs.critic:
        yield from _value_problems(training)
    else:
        yield from _group_problems(training, group_size)


def _demonstration_problems(training: TrainingSpec, *, given: bool) -> Iterator[Problem]:
    """Yield demonstrations without a loss that learns from them, or such a loss without any."""
    if given != training.needs.offline:
        told = "is given" if given else "names no file"
        yield Problem(
            ("training.loss", "demonstrations"),
            f"is {training.loss!r}, and demonstrations {told}: loss sft learns from "
            "demonstrations, all others from what the policy plays",
        )


def _teacher_problems(training: TrainingSpec, *, given: bool) -> Iterator[Problem]:
    """Yield a teacher without a loss that learns from it, or such a loss without a teacher."""
    if given != training.needs.teacher:
        told = "is given" if given else "is missing"
        yield Problem(
            ("training.loss", "teacher"),
            f"is {training.loss!r}, and teacher {told}: loss distill learns from the model at "
            "teacher: {url: http://HOST:8000/v1}, no other loss does",
        )


def _batch_problems(training: TrainingSpec) -> Iterator[Problem]:
    """Scales that an estimator does not have, and what cannot be known before a batch is whole."""
    needs, scale = training.needs, training.scale_rewards
    whole = needs.whole_batch and (not needs.critic or scale != "none")
    if whole and scale not in (None, "batch"):
        yield Problem(
            ("training.scale_rewards", "training.advantage"),
            f"is {scale}, but {training.advantage} normalises over the batch: leave it out",
        )
    if training.stream and (whole or scale == "batch"):
        key = "advantage" if whole else "scale_rewards"
        yield Problem(
            ("training.stream", f"training.{key}"),
            f"is true, but training.{key}: {getattr(training, key)} needs the whole batch before "
            "the step begins: leave one of the two out",
        )


def _turn_problems(training: TrainingSpec) -> Iterator[Problem]:
    """A discount of what is not weighed by turns; an estimator of a user's may discount."""
    if training.gamma != 1.0 and training.advantage in advantages_with(turns=False):
        yield Problem(
            ("training.gamma", "training.advantage"),
            f"is {training.gamma:g}, but advantage: {training.advantage} weighs a trajectory as a "
            f"whole: leave it out, or name one of {', '.join(advantages_with(turns=True))}",
        )


def _kl_problems(training: TrainingSpec) -> Iterator[Problem]:
    """Yield a KL term that has no weight."""
    if training.kl_in_reward and not training.kl_coef:
        yield Problem(
            ("training.kl_in_reward", "training.kl_coef"),
            "is true, but training.kl_coef is 0: give it the weight of the KL, as 0.001",
        )


def _value_problems(training: TrainingSpec) -> Iterator[Problem]:
    """A loss to which the values of a critic mean nothing."""
    needs, why = training.needs, ""
    if needs.group_values:
        why = "compares the trajectories of a group, and values are of each by itself"
    elif needs.teacher:
        why = "has the advantages of its teacher for every token"
    if why:
        yield Problem(
            ("training.advantage", "training.loss"),
            f"is {training.advantage}, but the loss {training.loss} {why}: leave it out, or take "
            "another loss",
        )


def _group_problems(training: TrainingSpec, group_size: int) -> Iterator[Problem]:
    """A critic's settings without one, and a group in which nobody can be compared."""
    for key in ("lam", "critic"):
        if getattr(training, key) != type(training).model_fields[key].default:
            yield Problem(
                (f"training.{key}", "training.advantage"),
                f"is for advantage: gae, which has a critic, and {training.advantage} has none: "
                "leave it out",
            )
    if group_size == 1:
        yield Problem(
            ("rollout.group_size", "training.advantage"),
            f"is 1, and advantage: {training.advantage} would have nobody to compare a trajectory "
            "with: give 2 or more, or set training.advantage: gae, whose critic needs no group",
        )
