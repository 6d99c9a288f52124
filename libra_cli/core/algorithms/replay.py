"""Groups that were trained, kept to be trained again: the replay buffer.

A group is trained once, and goes into the buffer when its step is done. Each later step trains on
its own groups and on ``groups`` more out of the buffer, drawn without replacement. The r-th in the
order of ``sampling`` is drawn with a probability proportional to 1 / r (rank-based prioritised
replay, arXiv 1511.05952), which needs no scale of rewards::

    recent      the most lately trained first
    reward      the highest mean reward first, as TBA does (arXiv 2503.18929)
    advantage   the greatest mean |reward - mean of the group| first; one without any is not drawn

The draw is a function of the run's seed, the step and what is held, so a machine that is given the
same events again draws the same. Tokens keep the log-probabilities and the versions that they were
generated with, and count as no new ones: not for the staleness bound, the step's reward or lengths,
nor as trained (``once``). The buffer goes on with a machine that is adopted; a run that goes on
from a checkpoint begins with an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log
from statistics import fmean

from libra_cli.config.problems import Problem
from libra_cli.config.training import ReplaySpec, StalenessSpec
from libra_cli.core.rollout.groups import Group
from libra_cli.core.types import GroupId, Version


@dataclass(slots=True)
class ReplayBuffer:
    """The groups that were trained last, whole ones and those that were closed."""

    spec: ReplaySpec
    seed: int
    #: By number, with the step that they were trained in; the longest held first.
    _held: dict[GroupId, tuple[int, Group]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, groups: Iterable[Group], step: int) -> None:
        """Hold the groups that a step has trained; those held the longest make room."""
        for group in groups:
            if not group.is_rest:
                self._held.pop(group.id, None)
                self._held[group.id] = (step, group)
        for group_id in list(self._held)[: -self.spec.capacity]:
            del self._held[group_id]

    def draw(self, step: int, held: Version, batch: Iterable[Group]) -> list[Group]:
        """Return the groups to train again in ``step``, from version ``held``, beside those of
        ``batch``.

        These are fewer than the recipe's ``groups`` where fewer are held.
        """
        taken = {group.id for group in batch}
        ranked = sorted(self._candidates(held, taken), key=self._priority, reverse=True)
        waits = {
            group.id: -log(_share(self.seed, step, group.id)) * rank
            for rank, (_, group) in enumerate(ranked, 1)
        }
        drawn = sorted(
            (group for _, group in ranked), key=lambda group: (waits[group.id], group.id)
        )
        return drawn[: self.spec.groups]

    def _candidates(self, held: Version, taken: set[GroupId]) -> list[tuple[int, Group]]:
        most = self.spec.most_staleness
        return [
            (step, group)
            for step, group in self._held.values()
            if group.id not in taken
            and (most is None or held - group.oldest <= most)
            and (self.spec.sampling != "advantage" or _spread(group) > 0)
        ]

    def _priority(self, entry: tuple[int, Group]) -> tuple[float, int, GroupId]:
        step, group = entry
        match self.spec.sampling:
            case "reward":
                return fmean(group.ended), step, group.id
            case "advantage":
                return _spread(group), step, group.id
            case "recent":
                return float(step), step, group.id

    def discard(self, groups: Iterable[Group]) -> None:
        """Drop replayed groups that the trainer has died with: they are not tried again."""
        for group in groups:
            self._held.pop(group.id, None)

    def rollback(self, step: int) -> None:
        """Drop the groups that were first trained after ``step``, to which the trainer is back."""
        self._held = {name: one for name, one in self._held.items() if one[0] <= step}


def replay_problems(replay: ReplaySpec, staleness: StalenessSpec) -> Iterator[Problem]:
    """Yield what a buffer cannot give, and what it cannot go with."""
    if replay.groups > replay.capacity:
        yield Problem(
            ("replay.groups", "replay.capacity"),
            f"is {replay.groups}, but only replay.capacity = {replay.capacity} are kept",
        )
    if staleness.masks:
        yield Problem(
            ("replay", "training.staleness"),
            "cannot go with the staleness rule token, which leaves old tokens out of the loss: "
            "write staleness: {rule: token, over: weight}, or another rule",
        )


def replay_metrics(groups: Sequence[Group], held: Version) -> dict[str, float | None]:
    """Metrics of what a step taken from version ``held`` trains again: groups, generated tokens,
    and the mean number of versions that these are behind.
    """
    runs = [
        (behind, end - start)
        for group in groups
        for member in group.members
        for branch in member.branches
        for behind, start, end in branch.behind(held)
    ]
    tokens = sum(count for _, count in runs)
    behind = sum(behind * count for behind, count in runs)
    return {
        "replayed_groups": len(groups),
        "replayed_tokens": tokens,
        "replayed_staleness_mean": behind / tokens if tokens else None,
    }


def _spread(group: Group) -> float:
    """Return the mean of |reward - mean reward| over the members of a group."""
    middle = fmean(group.ended)
    return fmean(abs(reward - middle) for reward in group.ended)


def _share(*parts: int) -> float:
    """A number in (0, 1] that is fixed by the parts, and looks drawn at random."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 1) / 2**64
