"""The advantage of each token that a teacher has judged (on-policy distillation).

For a token that the policy sampled with probability p, to which the teacher gives q::

    A_t = kl_coef (log q - log p) + advantage_coef A

with A the advantage by ``training.advantage``, of rewards. log p - log q is an estimate of the
reverse KL divergence KL(policy || teacher) at this token (k1), whose mean over the policy's own
samples it is, so a step of policy gradient with A_t lowers it: MiniLLM's single-step part (arXiv
2306.08543), GKD's on-policy reverse KL (arXiv 2306.13649), and what Thinking Machines' on-policy
distillation trains on. p is that of the server that generated the token; what has become of it
since is the matter of ``training.sampler_correction``, as with every advantage.

A token answers for its own divergence only, not for those of later tokens: that has a bias, which
the discount 0 of Tinker's ``kl_discount_factor`` has too, and much less variance.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra_cli.config.environment import TeacherSpec
from libra_cli.config.problems import Problem
from libra_cli.config.secrets import SECRET_IN_URL
from libra_cli.core.actions import TrainSample
from libra_cli.core.algorithms.base import Objective
from libra_cli.core.rollout.teaching import TeacherQueue
from libra_cli.core.types import Branch

MOST_NATS = 20.0
"""The largest log ratio of a token that counts: a factor of 5e8. vLLM gives -9999 for a probability
of 0, and one such token would be all of a step's gradient."""


class Distillation(Objective):
    """On-policy distillation: a trajectory ends when the teacher has judged its tokens."""

    def problems(self) -> Iterator[Problem]:
        """Yield what a teacher is not told, and what tokens that it has judged cannot go with."""
        teacher, rollout = self.recipe.teacher, self.recipe.rollout
        if teacher is None:
            return
        if teacher.url is not None and SECRET_IN_URL.search(teacher.url):
            yield Problem(
                ("teacher.url",),
                "has a secret in it, and this is no place for one; teacher.api_key is, as "
                "${TEACHER_API_KEY}",
            )
        if rollout.temperature != 1.0:
            yield Problem(
                ("rollout.temperature", "teacher"),
                f"is {rollout.temperature:g}, and the teacher's log-probabilities are at "
                "temperature 1: the two could not be compared; leave it out, which is 1",
            )
        if rollout.dynamic_sampling:
            yield Problem(
                ("rollout.dynamic_sampling", "teacher"),
                "leaves out groups in which all rewards are the same, and a teacher teaches by "
                "them as by others: leave it out",
            )

    def teacher(self) -> TeacherQueue | None:
        """The queue of trajectories that wait for the teacher."""
        spec = self.recipe.teacher
        return None if spec is None else TeacherQueue(spec.place, spec.patience_s)

    def by_token(self, tokens: Branch, runs: Sequence[tuple[int, float]]) -> array[float] | None:
        """The advantage of each token of a branch that the teacher has judged."""
        spec = self.recipe.teacher
        return None if spec is None else taught_advantages(tokens, runs, spec)

    def told(
        self, tokens: Branch, runs: Sequence[tuple[int, float]]
    ) -> Sequence[tuple[int, float]]:
        """The advantage of each token, as runs of equal ones."""
        values = self.by_token(tokens, runs)
        return runs if values is None else token_runs(values)

    def metrics_of(self, samples: Iterable[TrainSample]) -> dict[str, float | None]:
        """The reverse KL divergence. Where rewards have no weight, a group in which all are the
        same teaches as others do, and the share without signal is taken away."""
        spec = self.recipe.teacher
        if spec is None:
            return {}
        told = distillation_metrics(samples)
        return told if spec.advantage_coef else {**told, "share_without_signal": None}


def taught_advantages(
    tokens: Branch, runs: Sequence[tuple[int, float]], spec: TeacherSpec
) -> array[float]:
    """Return the advantage of each token of a branch; 0 for tokens the policy has not generated.

    ``runs`` are A of the module's formula, as (first token, value).
    """
    if not tokens.spans:
        return array("f", bytes(4 * len(tokens.token_ids)))
    of_reward: NDArray[np.float32] = np.zeros(len(tokens.token_ids), dtype=np.float32)
    for start, value in runs:
        of_reward[start:] = value
    values = -spec.kl_coef * _log_ratios(tokens) + spec.advantage_coef * of_reward
    return array("f", np.where(_mask(tokens), values, 0.0).astype(np.float32).tobytes())


def token_runs(values: array[float]) -> list[tuple[int, float]]:
    """Advantages by token as (token, value): from this token on. To be told, to four digits."""
    given = np.asarray(values)
    changed = np.flatnonzero(np.diff(given, prepend=np.float32(0.0)))
    return [(int(index), round(float(given[index]), 4)) for index in changed]


def distillation_metrics(samples: Iterable[TrainSample]) -> dict[str, float | None]:
    """Metrics of a batch's generated tokens: the mean reverse KL divergence in nats (k1), and the
    standard deviation of their advantages.
    """
    taught = [one for one in samples if one.tokens.spans]
    if not taught:
        return {"reverse_kl": None, "advantage_std": None}
    kl = np.concatenate([_log_ratios(one.tokens)[_mask(one.tokens)] for one in taught])
    values = np.concatenate(
        [np.asarray(one.token_advantages)[_mask(one.tokens)] for one in taught]
    ).astype(np.float64)
    return {
        "reverse_kl": float(kl.mean(dtype=np.float64)),
        "advantage_std": sqrt(float(values.var())),
    }


def _log_ratios(tokens: Branch) -> NDArray[np.float32]:
    """log p - log q of each token."""
    ratios = np.asarray(tokens.logprobs) - np.asarray(tokens.teacher)
    return np.clip(ratios, -MOST_NATS, MOST_NATS)


def _mask(tokens: Branch) -> NDArray[Any]:
    return np.asarray(tokens.loss_mask) != 0
