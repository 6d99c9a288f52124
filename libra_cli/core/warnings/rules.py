"""The rules: each looks at the newest steps and says in words what is wrong, or nothing.

A sentence has the numbers, then what is mostly done about it, in keys of the recipe. Where a
threshold comes from stands beside it: a paper, what other trainers take, or the runs it was
measured on. "Healthy runs" are 36 of pointer-chase that learned, 20 to 83 steps each: none of them
was told anything, when the rule of the gradient did not yet ask whether its norm comes down. Of two
more, whose reward fell from 0.71 to 0.24 and from 0.74 to 0.43, that was told; so were the falls in
two runs of 1,070 and 1,647 steps with 16 trajectories a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import sqrt
from statistics import fmean, stdev
from typing import Final, TypeAlias

from libra_cli.core.warnings.gaps import ExpectedGap
from libra_cli.core.warnings.series import FIRST_GAP, Numbers, change, newest

WINDOW = 10
"""Steps of a window."""
ENTROPY_LEFT = 0.5
"""The share of its entropy that a policy has left after ten steps. Entropy falls while a policy
learns (from 0.14 to 0.04 nats in 40 steps of healthy runs); the fall with the reward says that
exploration is over (entropy collapse: arXiv 2503.14476, 2505.22617)."""
ROLLOUT_KL = 0.1
"""Nats a token. Where log ratios are normal, their KL of 0.1 leaves an effective sample size of
exp(-0.2) = 0.82; PPO stops its updates at a tenth to a fifth of it (``target_kl`` of 0.01 to
0.02). Of three runs of pointer-chase that learned, of 40 steps each, the one at an exact staleness
of 1 had up to 0.005 in a step, at 2 up to 0.02 and at 8 up to 0.08. One that collapsed within three
steps, at 20 times its learning rate, had 0.35, 1.9, 0.69, 0.45 and 0.16 from the second step on."""
EFFECTIVE = 0.3
"""Share of the batch's tokens that importance weights leave, below which the documentation of
verl's rollout correction calls a batch degenerate. It was above 0.9 in each step of the same
three runs."""
WITHOUT_SIGNAL = 0.8
"""Share of groups that is too much: the mean of ``LONG`` steps less two standard errors. The two
runs of groups of 4 had 0.76 in the mean, with stretches above 0.8."""
LONG = 20
"""Steps over which a share of groups is told from chance."""
TRUNCATED = 0.5
"""Share of trajectories: beyond it most of the gradient is of attempts nobody saw the end of."""
REPEATED = 0.2
"""Share of trajectories with repeated text (``core.rollout.text_health``) that is too much. Within
turns it is 0 in all healthy runs; over turns 12 of 7,792 and 15 of 7,788 trajectories of two of
pointer-chase repeat an exchange."""
SIGNAL_BEFORE = 0.6
"""Share of groups without signal, at most, before a policy collapsed: that all of them are without
it in ``WINDOW`` steps, of one group each, is then a chance of less than 1 %."""
REWARD_LEFT = 0.7
"""The share of its best mean over ten steps that a reward has fallen to."""
LONGER = 1.3
"""Factor by which trajectories have become longer."""
LENGTH_PAYS = 0.5
"""Correlation of length and reward within groups; a third of the variance is a rule of thumb."""
UNREADABLE = 0.3
"""Share of tool calls. A model that has learned its format has under 0.05."""


@dataclass(frozen=True, slots=True)
class RuleBounds:
    """Settings of the recipe that rules compare with."""

    max_grad_norm: float
    gap: ExpectedGap


LearningRule: TypeAlias = Callable[[Sequence[Numbers], RuleBounds], str]
"""A sentence without its last stop, or nothing where all is well; the newest step is the last."""


def entropy_collapse(series: Sequence[Numbers], _: RuleBounds) -> str:
    """Warn where the entropy has halved while the reward fell."""
    entropy, reward = change(series, "entropy", WINDOW), change(series, "reward", WINDOW)
    if entropy is None or reward is None or not (entropy.fell and reward.fell):
        return ""
    if entropy.after > ENTROPY_LEFT * entropy.before:
        return ""
    return (
        f"entropy went from {entropy.before:.3g} to {entropy.after:.3g} nats in {WINDOW} steps "
        f"while the reward fell from {reward.before:.3g} to {reward.after:.3g}: lower "
        "training.learning_rate, or raise training.clip_high or training.entropy_coef"
    )


def signal_gone(series: Sequence[Numbers]) -> str:
    """Warn where no group teaches any more, with a lower reward than when most of them did.

    A run whose learning rate was 20 times too high had a reward of 0.31 in its second step and of 0
    from the fourth on, before there were steps enough for ``reward_collapse`` to compare.
    """
    silent = takewhile(lambda step: step.get("share_without_signal") == 1.0, reversed(series))
    steps = sum(1 for _ in silent)
    before = series[: len(series) - steps]
    now = newest(series, "reward", WINDOW)
    shares = newest(before, "share_without_signal", min(len(before), WINDOW))
    earned = newest(before, "reward", len(shares))
    if steps < WINDOW or not (now and shares and earned) or fmean(shares) > SIGNAL_BEFORE:
        return ""
    if fmean(now) >= REWARD_LEFT * max(earned):
        return ""
    return (
        f"the policy has collapsed: no group taught anything in the last {steps} steps, whose "
        f"reward is {fmean(now):.3g} and was {max(earned):.3g}: lower training.learning_rate, then "
        "start again, or --resume from a checkpoint before that"
    )


def reward_collapse(series: Sequence[Numbers], _: RuleBounds) -> str:
    """Warn where the reward is far below what it has been."""
    if gone := signal_gone(series):
        return gone
    rewards = newest(series, "reward", min(len(series), LONGEST))
    if len(rewards) < 2 * WINDOW:
        return ""
    starts = range(len(rewards) - 2 * WINDOW + 1)
    best = max(starts, key=lambda at: fmean(rewards[at : at + WINDOW]))
    compared = [{"reward": value} for value in (*rewards[best:][:WINDOW], *rewards[-WINDOW:])]
    fall = change(compared, "reward", WINDOW)
    if fall is None or not fall.fell or not 0 < fall.before * REWARD_LEFT > fall.after:
        return ""
    return (
        f"the reward is {fall.after:.3g} over {WINDOW} steps and was {fall.before:.3g} "
        f"{len(rewards) - best - WINDOW} steps ago: lower training.learning_rate or "
        "training.max_staleness; --resume goes on from the last checkpoint, and training.export "
        "keeps the best"
    )


def off_policy(series: Sequence[Numbers], _: RuleBounds) -> str:
    """Warn where the trainer's policy is far from the one that generated, step after step."""
    kl = newest(series, "rollout_kl", WINDOW // 2)
    if not kl or min(kl) <= ROLLOUT_KL:
        return ""
    return (
        f"the KL divergence to the rollout policy was above {ROLLOUT_KL:g} nats a token in each of "
        f"{WINDOW // 2} steps ({fmean(kl):.2g} in the mean): lower training.max_staleness or "
        "training.learning_rate; if training.max_staleness is 0, compare the gap in libra status"
    )


def few_effective_samples(series: Sequence[Numbers], _: RuleBounds) -> str:
    """Warn where a few tokens carry all the weight."""
    sizes = newest(series, "effective_sample_size", WINDOW // 2)
    if not sizes or fmean(sizes) >= EFFECTIVE:
        return ""
    return (
        f"importance weights leave an effective {fmean(sizes):.0%} of the tokens (mean of "
        f"{WINDOW // 2} steps): lower training.max_staleness or training.learning_rate"
    )


def without_signal(series: Sequence[Numbers], _: RuleBounds) -> str:
    """Warn where nearly all groups teach nothing."""
    shares = newest(series, "share_without_signal", LONG)
    if signal_gone(series):
        return ""  # told by ``reward_collapse``, with what helps
    if not shares or fmean(shares) - 2 * stdev(shares) / sqrt(LONG) <= WITHOUT_SIGNAL:
        return ""
    rewards = newest(series, "reward", LONG)
    return (
        f"{fmean(shares):.0%} of groups teach nothing, since all their members have the same "
        f"reward (mean of {LONG} steps, reward {fmean(rewards):.3g}): set "
        "rollout.dynamic_sampling, choose harder or easier tasks, or raise rollout.group_size"
    )


def truncated(series: Sequence[Numbers], _: RuleBounds) -> str:
    """Warn where most trajectories are cut."""
    shares = newest(series, "share_truncated", WINDOW)
    if not shares or fmean(shares) <= TRUNCATED:
        return ""
    return (
        f"{fmean(shares):.0%} of trajectories are cut by a limit (mean of {WINDOW} steps): raise "
        "model.max_len, rollout.max_turn_tokens or rollout.max_turns, or set rollout.overlong"
    )


def gradient_clipped(series: Sequence[Numbers], bounds: RuleBounds) -> str:
    """Warn where the gradient is clipped in every step, and its norm does not come down.

    The norm was 0.08 to 0.5 in healthy runs. Imitation begins with 8 (three runs of
    ``recipes/warm-start-sft.yaml``) and is mostly below 1 from step 32 on: that is no trouble.
    """
    norms, moved = newest(series, "grad_norm", WINDOW), change(series, "grad_norm", WINDOW)
    if moved is None or moved.fell or min(norms) <= bounds.max_grad_norm:
        return ""
    return (
        f"the gradient was clipped in each of the last {WINDOW} steps (its norm is "
        f"{fmean(norms):.3g} and does not fall, training.max_grad_norm {bounds.max_grad_norm:g}): "
        "lower training.learning_rate, or raise training.max_grad_norm if it has always been so"
    )


def repetition(series: Sequence[Numbers], _: RuleBounds) -> str:
    """Warn where text repeats itself, and did less before."""
    repeated = change(series, "share_repeated", WINDOW)
    if repeated is None or repeated.after <= max(REPEATED, 1.5 * repeated.before):
        return ""
    return (
        f"{repeated.after:.0%} of trajectories repeat themselves, {repeated.before:.0%} did "
        f"{WINDOW} steps before: look at them; lower training.learning_rate, or give repeated text "
        "no reward"
    )


def length_pays(series: Sequence[Numbers], _: RuleBounds) -> str:
    """Warn where the reward rises with the length, and so does the length."""
    length, reward = change(series, "mean_length", LONG), change(series, "reward", LONG)
    pays = newest(series, "reward_length_correlation", LONG)
    if length is None or reward is None or not pays or fmean(pays) <= LENGTH_PAYS:
        return ""
    if not (length.rose and reward.rose) or length.after <= LONGER * length.before:
        return ""
    return (
        f"within groups the longer trajectories have the higher reward (correlation "
        f"{fmean(pays):.2f}), and the mean length rose from {length.before:.4g} to "
        f"{length.after:.4g} tokens in {LONG} steps: see whether the reward pays for length; "
        "training.loss: dr_grpo does not"
    )


def unreadable_calls(series: Sequence[Numbers], _: RuleBounds) -> str:
    """Warn where many tool calls cannot be read."""
    shares = newest(series, "share_unreadable", WINDOW)
    if not shares or fmean(shares) <= UNREADABLE:
        return ""
    return (
        f"{fmean(shares):.0%} of tool calls cannot be read (mean of {WINDOW} steps): look whether "
        "model.tool_format is the model's own, or begin with demonstrations"
    )


def gap_grew(series: Sequence[Numbers], bounds: RuleBounds) -> str:
    """Warn where servers and trainer differ by more than rounding, or by twice what they did.

    In many steps no token is of the version that the trainer holds; they count for nothing.
    """
    gaps = [step["logprob_gap"] for step in series if "logprob_gap" in step][-WINDOW:]
    if len(gaps) < WINDOW:
        return ""
    now, first = fmean(gaps), series[-1].get(FIRST_GAP)
    told = f"servers and trainer differ by {now:.2g} nats a token (mean of {WINDOW} steps"
    if now > bounds.gap.wrong:
        told += f"; rounding is below {bounds.gap.wrong:g})"
    elif first is not None and now > max(2 * first, bounds.gap.usual) and min(gaps) > first:
        told += f") and did by {first:.2g} in the first {WINDOW}"
    else:
        return ""
    return (
        f"{told}: look at the gap of each server in libra status; where one has it alone, its next "
        "process may not; where all have, see whether a small model has it with model.dtype: "
        "float32, or with rollout.quantization: null"
    )


RULES: Final[Mapping[str, LearningRule]] = {
    "entropy": entropy_collapse,
    "reward": reward_collapse,
    "off-policy": off_policy,
    "effective-samples": few_effective_samples,
    "no-signal": without_signal,
    "truncated": truncated,
    "gradient": gradient_clipped,
    "repetition": repetition,
    "length": length_pays,
    "tool-format": unreadable_calls,
    "logprob-gap": gap_grew,
}
"""The rules, by the name under which a warning is told; a new rule needs no other edit."""
LONGEST = 60
"""The most steps that a rule looks back."""
