"""Who computes which trajectories of an update: the trainer group or a gradient worker, by speed.

Trajectories go one by one, since each comes with the baseline of its group; longest first, each to
whoever would have it done first (longest-processing-time rule, Graham 1969: within 4/3 of the best
makespan). Whole groups are coarser, a step has only some tens of them; they are dealt where a loss
compares the trajectories of a group with one another.
Speeds are tokens a second, smoothed over steps. Nobody's speed is known before the first step: then
a GPU counts as much as another. The trainer group takes its part first where all are equal, since
what it computes needs no transfer.

A worker's gradients are as many bytes however small its share is, so the trainer has them
``transfer_s`` later than they are computed, and one that is still loading its version when a step
begins computes later by as much as it was seen to be. A worker with which a trajectory would be
done later than with everybody else has no share. Until a share was fetched, what counts is how long
its host took to fetch a weight version, times the bytes of gradients over those of a version.

Guarantee: every trajectory is dealt exactly once, and the sum of gradients is the same however
they are dealt.
Limit: seconds of computing are counted as proportional to tokens, and transfer as if it began when
they are over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from libra_cli.config.minibatches import first_minibatch
from libra_cli.core.actions import BatchPartition, TrainSample
from libra_cli.core.cluster.replica import Replica
from libra_cli.core.types import Seconds, SlotId, Tokens, TrajectoryId

KEEP = 0.5
"""Weight of what was known before in a new speed."""
MARGIN = 0.9
"""A worker is dealt as if it were this much slower: the trainer should not have to wait."""


class Speeds:
    """Tokens a second of the trainer group and of each worker; None until measured."""

    def __init__(self, trainer_gpus: int) -> None:
        self._trainer_gpus = max(1, trainer_gpus)
        self._trainer: float | None = None
        self._workers: dict[SlotId, float] = {}
        self._fetched: dict[SlotId, Seconds] = {}
        self._guessed: dict[SlotId, Seconds] = {}
        self._late: dict[SlotId, Seconds] = {}

    def trainer(self, tokens: float, seconds: Seconds) -> None:
        """Learn the trainer group's speed from the tokens it computed itself, in ``seconds``."""
        if tokens > 0 and seconds > 0:
            self._trainer = _blend(self._trainer, tokens / seconds)

    def resized(self, trainer_gpus: int) -> None:
        """The trainer group has so many GPUs now, and is faster or slower by as much."""
        gpus = max(1, trainer_gpus)
        if self._trainer is not None:
            self._trainer *= gpus / self._trainer_gpus
        self._trainer_gpus = gpus

    def worker(self, slot: SlotId, tokens: Tokens, seconds: Seconds) -> None:
        """Learn a worker's speed from the tokens of a share, computed in ``seconds``."""
        if tokens > 0 and seconds > 0:
            self._workers[slot] = _blend(self._workers.get(slot), tokens / seconds)

    def fetched(self, slot: SlotId, transfer_s: Seconds) -> None:
        """The trainer group fetched a share's gradients from a worker."""
        if transfer_s > 0:
            self._fetched[slot] = _blend(self._fetched.get(slot), transfer_s)

    def took(self, slot: SlotId, busy_s: Seconds, own_s: Seconds, waited_s: Seconds) -> None:
        """Learn how late a worker begins to compute.

        It sent its share after ``busy_s`` of computing, the trainer computed its own part in
        ``own_s`` and then waited ``waited_s``: what is left is how late the worker began, at most.
        """
        most = max(0.0, own_s + waited_s - busy_s)
        known = self._late.get(slot)
        if waited_s > 0:
            self._late[slot] = _blend(known, most)
        elif known is not None:
            self._late[slot] = min(known, most)

    def lag_s(self, slot: SlotId) -> Seconds:
        """Seconds of a step in which a worker computes nothing: before it
        begins, and while its gradients travel.
        """
        return self._late.get(slot, 0.0) + self.transfer_s(slot)

    def would_fetch(self, slot: SlotId, transfer_s: Seconds) -> None:
        """Lower the guess of how long fetching a worker's gradients takes to ``transfer_s``."""
        self._guessed[slot] = min(transfer_s, self._guessed.get(slot, transfer_s))

    def transfer_s(self, slot: SlotId) -> Seconds:
        """Seconds that a share's gradients travel; 0 where seconds cannot be compared yet."""
        if self._trainer is None:
            return 0.0
        return self._fetched.get(slot, self._guessed.get(slot, 0.0))

    def of_trainer(self) -> float:
        """Return the speed of the trainer group; unmeasured, its number of GPUs."""
        return self._trainer or float(self._trainer_gpus)

    def of(self, replica: Replica) -> float:
        """Return the speed of a worker; unmeasured, the trainer group's by the number of GPUs."""
        guess = self.of_trainer() * replica.slot.num_devices / self._trainer_gpus
        return MARGIN * self._workers.get(replica.slot.id, guess)


def of_first_update(
    samples: Sequence[TrainSample], *, minibatches: int, seed: Sequence[int]
) -> tuple[TrainSample, ...]:
    """Return the samples of a step that need no later weights than workers have, as the trainer
    deals them; ``seed`` is the run's, and the number of the step."""
    groups = [sample.trajectory.id.group for sample in samples]
    return tuple(samples[i] for i in first_minibatch(groups, parts=minibatches, seed=seed))


def deal_shares(
    samples: Sequence[TrainSample],
    workers: Iterable[Replica],
    speeds: Speeds,
    *,
    whole_groups: bool = False,
) -> tuple[BatchPartition, ...]:
    """Return the shares of the workers; a worker that would get nothing has none."""
    ready = list(workers)
    pace = [speeds.of_trainer(), *(speeds.of(replica) for replica in ready)]
    begin = [0.0, *(speeds.lag_s(replica.slot.id) for replica in ready)]
    load = [0.0] * len(pace)
    dealt: list[list[TrajectoryId]] = [[] for _ in pace]
    tokens_of = {sample.trajectory.id: sample.trajectory.all_tokens for sample in samples}
    for trajectories in _units(tokens_of, whole_groups):
        tokens = sum(tokens_of[one] for one in trajectories)
        ends = [begin[i] + (load[i] + tokens) / pace[i] for i in range(len(pace))]
        first = ends.index(min(ends))
        load[first] += tokens
        dealt[first] += trajectories
    pairs = zip(ready, dealt[1:], strict=True)
    return tuple(
        BatchPartition(replica.slot.id, replica.incarnation, tuple(sorted(ids)))
        for replica, ids in pairs
        if ids
    )


def _units(
    tokens_of: Mapping[TrajectoryId, Tokens], whole_groups: bool
) -> list[list[TrajectoryId]]:
    """Return what is dealt as one, longest first: single trajectories, or whole groups."""
    units: dict[tuple[int, ...], list[TrajectoryId]] = {}
    for one in tokens_of:
        units.setdefault((one.group,) if whole_groups else tuple(one), []).append(one)
    return sorted(units.values(), key=lambda unit: (-sum(tokens_of[one] for one in unit), unit))


def _blend(before: float | None, now: float) -> float:
    return now if before is None else KEEP * before + (1 - KEEP) * now
