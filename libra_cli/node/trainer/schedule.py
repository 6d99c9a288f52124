"""The learning rate as a function of the optimizer step; shapes have transformers' names."""

from __future__ import annotations

from math import cos, pi

from libra_cli.config.training import TrainingSpec


def learning_rate_at(step: int, training: TrainingSpec, steps: int) -> float:
    """The rate of optimizer step ``step``, counted from 1, of a run of ``steps``.

    It rises linearly over ``warmup_steps``; then it is constant, or falls to ``min_lr_ratio`` of
    the peak, which the last step has: linearly, as half a cosine (arXiv 1608.03983), or linearly
    over the last ``decay_steps`` only (warmup-stable-decay, arXiv 2404.06395). Steps beyond the
    last have its rate.
    """
    warmup = training.warmup_steps
    if step < warmup:
        return training.learning_rate * step / warmup
    if training.lr_scheduler_type == "constant":
        return training.learning_rate
    first = warmup
    if training.lr_scheduler_type == "warmup_stable_decay":
        first = max(warmup, steps - _decay_steps(training, steps))
    fallen = min(1.0, max(0, step - first) / max(1, steps - first))
    left = (1 + cos(pi * fallen)) / 2 if training.lr_scheduler_type == "cosine" else 1 - fallen
    return training.learning_rate * (training.min_lr_ratio + (1 - training.min_lr_ratio) * left)


def _decay_steps(training: TrainingSpec, steps: int) -> int:
    """A tenth of the run where the recipe does not say, as in the paper."""
    return max(1, steps // 10) if training.decay_steps is None else training.decay_steps
