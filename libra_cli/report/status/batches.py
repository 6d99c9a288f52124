"""The part of the summary on batches: tokens over the bound, late trajectories, lengths trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from libra_cli.core.records import StepRecord
from libra_cli.runtime.store.reader import Reader

_Steps: TypeAlias = Sequence[tuple[StepRecord, Mapping[str, float | None]]]

LONGEST = 0.1
"""The share of all trajectories that is called the longest."""


@dataclass(frozen=True, slots=True)
class BatchesPart:
    """Batches of all steps. Shares are 0 to 1, staleness is in versions, over generated tokens.

    ``groups_closed`` were trained without some members; of these, ``trajectories_left`` in all,
    ``trajectories_late`` were trained in a later step. ``played_length`` and ``trained_length`` are
    mean generated tokens; ``longest_trained`` is the share of the longest tenth of the members of
    trained groups that was trained, by what each had generated when it ended or now.
    ``groups_filtered`` had no signal, and ``share_filtered`` of all generated tokens was theirs; of
    trained trajectories ``share_truncated`` was cut by a limit, None if no step tells.
    """

    SHOWN: ClassVar[Mapping[str, str]] = {"over_bound": "share_over_bound"}
    share_over_bound: float | None
    token_staleness_mean: float | None
    token_staleness_max: int | None
    groups_closed: int
    trajectories_left: int
    trajectories_late: int
    played_length: float | None
    trained_length: float | None
    longest_trained: float | None
    groups_filtered: int
    share_filtered: float | None
    share_truncated: float | None


def batches(reader: Reader, steps: Sequence[StepRecord]) -> BatchesPart:
    """The batches of a run; nothing is known of steps that an older libra took."""
    known = [(step, step.batch) for step in steps if step.batch]
    tokens = sum(step.generated_tokens for step, _ in known)
    closed = int(sum(batch["groups_closed"] or 0 for _, batch in known))
    oldest = [batch["token_staleness_max"] or 0 for _, batch in known]
    lengths = [(step.mean_length, batch["played_length"]) for step, batch in known]
    both = [(trained, played) for trained, played in lengths if played is not None]

    def mean(name: str) -> float | None:
        total = sum((batch[name] or 0) * step.generated_tokens for step, batch in known)
        return total / tokens if tokens else None

    return BatchesPart(
        share_over_bound=mean("share_over_bound"),
        token_staleness_mean=mean("token_staleness_mean"),
        token_staleness_max=int(max(oldest)) if oldest else None,
        groups_closed=closed,
        trajectories_left=int(sum(batch["trajectories_left"] or 0 for _, batch in known)),
        trajectories_late=int(sum(batch["trajectories_late"] or 0 for _, batch in known)),
        played_length=sum(p for _, p in both) / len(both) if both else None,
        trained_length=sum(t for t, _ in both) / len(both) if both else None,
        longest_trained=_longest(reader.members_of_trained_groups()) if closed else None,
        groups_filtered=int(_sum(known, "groups_filtered")),
        share_filtered=_share_filtered(known),
        share_truncated=_mean(known, "share_truncated"),
    )


def _sum(known: _Steps, name: str) -> float:
    return sum(batch.get(name) or 0 for _, batch in known)


def _mean(known: _Steps, name: str) -> float | None:
    """Return the mean over the steps whose batch has this number; None if none has."""
    values = [value for _, batch in known if (value := batch.get(name)) is not None]
    return sum(values) / len(values) if values else None


def _share_filtered(
    known: _Steps,
) -> float | None:
    """The share of filtered tokens among the generated ones, of steps with dynamic sampling."""
    sampled = [(step, batch) for step, batch in known if "filtered_tokens" in batch]
    filtered = _sum(sampled, "filtered_tokens")
    tokens = filtered + sum(step.generated_tokens for step, _ in sampled)
    return filtered / tokens if tokens else None


def _longest(members: Sequence[tuple[int, bool]]) -> float | None:
    """The trained share of the longest trajectories, of pairs of (generated tokens, trained)."""
    if not members:
        return None
    ordered = sorted(length for length, _ in members)
    least = ordered[int((1 - LONGEST) * (len(ordered) - 1))]
    longest = [trained for length, trained in members if length >= least]
    return sum(longest) / len(longest)
