"""The work of a step: what the recipe says of it, and what was played and trained beside it."""

from __future__ import annotations

from collections import deque

from libra_cli.config.recipe import Recipe
from libra_cli.core.planning.admission import RECENT
from libra_cli.core.records import StepRecord
from libra_cli.core.rollout.staleness import StalenessRule, rule_of
from libra_cli.core.workload import BatchOverhead, TrajectoryLimits, TrajectorySample, Workload


def workload_of(
    recipe: Recipe,
    samples: tuple[TrajectorySample, ...],
    extras: BatchOverhead | None = None,
    rule: StalenessRule | None = None,
) -> Workload:
    """The work of a recipe's step, if it is like these trajectories; extras where none were seen
    are those that the recipe asks for, and the rule the one that a run begins with."""
    rule = rule or rule_of(recipe.training)
    return Workload(
        samples,
        recipe.trajectories_per_step,
        overlap=rule.overlap,
        late=rule.late,
        group_size=recipe.group_size,
        holders=rule.holders(recipe.group_size),
        ready=rule.ready,
        extras=extras or extras_of(recipe),
        limits=limits_of(recipe),
        keeps_kv=not recipe.weight_sync.clear_cache,
    )


def limits_of(recipe: Recipe) -> TrajectoryLimits:
    """Return the limits of a trajectory's growth, by the recipe."""
    rollout = recipe.rollout
    return TrajectoryLimits(recipe.model.max_len, rollout.max_turns, rollout.max_turn_tokens)


def extras_of(recipe: Recipe) -> BatchOverhead:
    """Return an upper bound on work beside the batch, by the recipe; without filtered groups, whose
    number nobody knows.
    """
    replayed = recipe.replay.groups / recipe.training.groups_per_step if recipe.replay else 0.0
    return BatchOverhead(
        surplus=recipe.rollout.oversample / recipe.group_size,
        replayed=replayed,
    )


class ExtraWork:
    """The tokens that the newest steps played and trained beside their batches."""

    def __init__(self) -> None:
        #: Of each step: tokens of its batch, filtered, surplus and replayed ones.
        self._tokens: deque[tuple[float, ...]] = deque(maxlen=RECENT)

    def step(self, row: StepRecord) -> BatchOverhead:
        """Take in a step that is done; returns its extra work."""
        self._tokens.append(_batch_tokens(row))
        return overhead_of(row)

    def mean(self, steps: int) -> BatchOverhead | None:
        """The mean of the newest steps by tokens; None before the first step."""
        newest = list(self._tokens)[-steps:]
        return _overhead(tuple(map(sum, zip(*newest, strict=True)))) if newest else None


def overhead_of(row: StepRecord) -> BatchOverhead:
    """Return what a step played and trained beside its batch."""
    return _overhead(_batch_tokens(row))


def _batch_tokens(row: StepRecord) -> tuple[float, ...]:
    """Return the tokens of a step's batch, and its filtered, surplus and replayed ones."""
    names = ("filtered_tokens", "surplus_tokens", "replayed_tokens")
    return (float(row.generated_tokens), *(row.batch.get(name) or 0.0 for name in names))


def _overhead(tokens: tuple[float, ...]) -> BatchOverhead:
    batch, *others = tokens
    return BatchOverhead(*(other / max(1.0, batch) for other in others))
