"""The names under which monitors are told of a step: one table, with units.

The numbers of a step are columns of its ``StepRecord``, or stand there by name in ``batch_json``
and ``metrics_json``; a few are means of what was saved since the step before. Monitors have names
as the users of TRL, verl, prime-rl and slime know them, in groups that a dashboard folds. What is
not in the table is named by where it comes from: a metric of a loss or a trainer ``train/NAME``,
one of the batch ``batch/NAME``, one of a rollout server ``server/NAME``; a name that has a group
already (``env/NAME``) stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final, Literal, TypeAlias, TypeGuard

from libra_cli.core.records import EvaluationRecord, StepRecord

Source: TypeAlias = Literal["step", "batch", "trainer", "between", "server"]
"""Columns of the step, its ``batch_json``, its ``metrics_json``, what was saved since the step
before, or the readings of the servers since then."""


@dataclass(frozen=True, slots=True)
class MetricName:
    """One number of a step: its name in monitors, where it comes from, and its meaning."""

    key: str
    """The name in monitors, for example ``reward/mean``."""
    name: str
    """The name in the run's database, for example the column ``reward``; empty if it has none."""
    source: Source
    unit: str
    """The unit; empty for a number without one."""
    meaning: str


def _table(source: Source, rows: str) -> Iterator[MetricName]:
    for row in rows.strip().splitlines():
        key, name, unit, meaning = (part.strip() for part in row.split("|"))
        yield MetricName(key, name, source, unit, meaning)


METRIC_NAMES: Final[tuple[MetricName, ...]] = (
    *_table(
        "step",
        """
reward/mean | reward | reward | mean over the trajectories of the batch
response_length/mean | mean_length | tokens | generated tokens of a trajectory, all its turns
response_length/p99 | p99_length | tokens | the 99th percentile of that
staleness/mean | staleness_mean | versions | how far the oldest token of a trajectory is behind
staleness/max | staleness_max | versions | the largest of that
train/logprob_gap | logprob_gap | nats | mean difference of log-probabilities, rollout and trainer
train/logprob_gap_tokens | logprob_gap_tokens | tokens | that it is a mean over
batch/generated_tokens | generated_tokens | tokens | generated tokens of the batch
batch/context_tokens | context_tokens | tokens | all tokens of the batch, prompts and tools too
perf/tokens_per_s | tokens_per_s | tokens/s | generated tokens of the batch over the step's time
time/step | | s | from the end of the step before, or when the trainer was free, to its end
time/wait_for_batch | waited_s | s | that the trainer waited, before the step and between its parts
time/batch_held | held_s | s | of that, with a full batch, for groups about to be too old
time/between_parts | between_parts_s | s | of time/wait_for_batch, between parts of a streamed step
time/train | trainer_s | s | that the trainer computed
time/ended_at | ended_at | s | since the epoch
        """,
    ),
    *_table(
        "batch",
        """
reward/std | reward_std | reward | standard deviation within a group, mean over groups
reward/frac_zero_std | share_without_signal | share | groups in which every advantage is 0
advantage/std | advantage_std | | of the advantages of the batch's generated tokens
reward/groups_filtered | groups_filtered | groups | without signal, not trained, since the last step
reward/filtered_tokens | filtered_tokens | tokens | generated in these
reward/share_filtered | share_filtered | share | of these and the batch's generated tokens
curriculum/tasks_played | tasks_played | tasks | of the curriculum's pool, at least once
curriculum/tasks_in_band | tasks_in_band | tasks | of these, neither too hard nor too easy
response_length/truncated | share_truncated | share | of trajectories that a limit cut
response_length/surplus_tokens | surplus_tokens | tokens | of oversampled ones that were stopped
num_turns/mean | turns_mean | turns | of a trajectory
num_branches/mean | branches_mean | branches | of a trajectory, the first included
tools/calls | tools_mean | calls | tool calls of a trajectory
tools/unreadable | share_unreadable | share | of tool calls, which could not be read
response/repeated | share_repeated | share | of trajectories in which some text repeats
reward/length_correlation | reward_length_correlation | | of length and reward, within groups
response_length/played_mean | played_length | tokens | of all that ended, trained or not
staleness/token_mean | token_staleness_mean | versions | how far a generated token is behind
staleness/token_max | token_staleness_max | versions | the largest of that
staleness/tokens_over_bound | tokens_over_bound | tokens | behind by more than max_staleness
staleness/share_over_bound | share_over_bound | share | of the batch's generated tokens
distill/reverse_kl | reverse_kl | nats | log(policy / teacher), mean over generated tokens (k1)
replay/groups | replayed_groups | groups | trained again, besides those of the batch
replay/tokens | replayed_tokens | tokens | generated tokens of these
replay/staleness | replayed_staleness_mean | versions | how far a generated token of these is behind
        """,
    ),
    *_table(
        "trainer",
        """
train/loss | loss | | the loss as the recipe's loss defines it
train/token_accuracy | token_accuracy | share | of imitated tokens that are the likeliest (sft)
train/kl | kl | nats | from the first policy, mean over tokens (k3), with kl_coef alone
train/entropy | entropy | nats | of the policy, mean over generated tokens
train/clip_frac | clip_fraction | share | of tokens whose update was clipped or truncated
clip_ratio/low_mean | clip_ratio/low_mean | share | of tokens clipped that it made less likely
clip_ratio/high_mean | clip_ratio/high_mean | share | of tokens clipped that it made more likely
train/mask_frac | mask_fraction | share | of tokens that sampler_correction gives no weight
train/grad_norm | grad_norm | | L2 norm of the gradient before it is clipped, mean over updates
train/update_ratio | update_ratio | | norm of an update over that of the parameters, sampled
train/lr | learning_rate | | AdamW's learning rate
train/tis_mean | tis_mean | | mean truncated importance weight
train/rollout_kl | rollout_kl | nats | of trainer and rollout policy, mean over tokens (k3)
train/ppo_kl | ppo_kl | nats | of before the first update and now, with several updates (k1)
critic/vf_loss | value_loss | | loss of the values of turns (gae), mean over its updates
critic/vf_explained_var | explained_variance | share | of the returns' variance, by values (gae)
train/ess | effective_sample_size | share | of the batch that it is worth, weighted without bounds
rollout_ratio/below_half | rollout_ratio/below_half | share | of tokens, trainer to rollout ratio
rollout_ratio/above_2 | rollout_ratio/above_2 | share | the same, over 2
time/compile | compile_s | s | of time/train, spent compiling layers; the rest are steady steps
train/routes_differ | routes_differ | share | of (token, layer), the router's own experts are others
        """,
    ),
    *_table(
        "between",
        """
response_length/clip_ratio | | share | of turns that were cut by a limit of tokens
tools/failure_rate | | share | of tool calls that ended in an error or a timeout
time/weight_sync | | s | from a version's publication until a server serves it, mean
        """,
    ),
    *_table(
        "server",
        """
server/running | running | requests | inside a server, mean over readings of all servers
server/waiting | waiting | requests | that a server has queued
server/kv_usage | kv_use | share | of a server's KV cache
server/prefix_hit_rate | prefix_hit_rate | share | of prompt tokens found in the cache
server/preemptions | preemptions | requests | preempted since the server's start
server/occupancy | occupancy | share | of a server's seats that were taken
server/tokens_per_s | tokens_per_s | tokens/s | that a server generates
        """,
    ),
)
"""All names that libra gives; a test compares them with the page ``help/monitors.md``."""

_KEYS: Final[Mapping[tuple[Source, str], str]] = {
    (one.source, one.name): one.key for one in METRIC_NAMES if one.name
}
_GROUPS: Final[Mapping[Source, str]] = {"batch": "batch", "trainer": "train", "server": "server"}


def key_of(source: Source, name: str) -> str:
    """The name by which monitors know a metric."""
    known = _KEYS.get((source, name))
    return known or (name if "/" in name else f"{_GROUPS[source]}/{name}")


def step_metrics(step: StepRecord) -> dict[str, float]:
    """Every number that the step's row has, by the name that monitors know.

    What is unknown or not finite is left out.
    """
    columns = ((one.key, getattr(step, one.name)) for one in _COLUMNS)
    named = dict(columns) | {"time/step": step.period_s}
    named |= {key_of("batch", name): value for name, value in step.batch.items()}
    named |= {key_of("trainer", name): value for name, value in step.metrics.items()}
    return {key: float(value) for key, value in named.items() if is_number(value)}


def evaluation_metrics(evaluation: EvaluationRecord) -> dict[str, float]:
    """Every number of an evaluation, as ``eval/NAME/pass@1``, and the seconds that it took.

    What is unknown or not finite is left out.
    """
    began, ended = evaluation.started_at, evaluation.ended_at
    named = {
        **evaluation.metrics,
        "failed": float(evaluation.failed),
        "version_mean": evaluation.version_mean,
        "seconds": None if ended is None else ended - began,
    }
    prefix = f"eval/{evaluation.name}"
    return {f"{prefix}/{name}": float(value) for name, value in named.items() if is_number(value)}


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether the value is known and finite."""
    return value is not None and isfinite(value)


_COLUMNS: Final = [one for one in METRIC_NAMES if one.source == "step" and one.name]
