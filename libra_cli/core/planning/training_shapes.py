"""How fast any number of GPUs can train a step: a tree TP -> DP, pruned.

A branch is cut where a rank does not hold what it must, or where communication takes more than
``MAX_COMMUNICATION`` of the arithmetic; memory is looked at first, since communication can be
waited out and it cannot. The tree and its bound are those of Libra (arXiv 2606.03077), without its
levels for pipelines and experts, which no trainer here has.

Guarantee: ``best(gpus)`` is the fastest shape left of all with at most that many GPUs, and never
slower with more of them. If pruning for speed would leave a budget without any shape, the fastest
that has the memory is taken. Limit: tensor parallelism stays inside a node of the profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from libra_cli.core.costs.memory import SHARD_BYTES
from libra_cli.core.costs.observed import UNCHECKED_GIB
from libra_cli.core.costs.profile import (
    GIB,
    NothingFits,
    TrainingCost,
    TrainingShape,
)
from libra_cli.core.costs.workload import Workload
from libra_cli.core.types import Seconds

MAX_COMMUNICATION = 0.5
"""Seconds of communication for each second of arithmetic; as published for Libra."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A shape and what it comes to: a step's seconds, a rank's memory in GiB, and the seconds of
    communication for each second of arithmetic."""

    shape: TrainingShape
    seconds: Seconds
    memory_gib: float
    communication: float

    @property
    def is_lean(self) -> bool:
        """Whether communication would not prune it."""
        return self.communication <= MAX_COMMUNICATION


WORKER_BYTES = 8
"""Bytes of a parameter in a gradient worker: float32 weight and gradient (as in
``node.model.policy``)."""
LARGEST = 256
"""GPUs up to which the least world that fits is looked for when none does."""


class TrainingTree:
    """The fastest shape for every world up to ``gpus``."""

    def __init__(
        self,
        cost: TrainingCost,
        workload: Workload,
        gpus: int,
        *,
        tensor_parallels: tuple[int, ...] = (1, 2, 4, 8),
    ) -> None:
        self._cost = cost
        self._workload = workload
        self._longest = workload.longest.context
        self._degrees = tuple(d for d in tensor_parallels if d <= cost.node_gpus)
        self._best = self._solve(gpus)

    def best(self, gpus: int) -> TrainingPlan | None:
        """The fastest with at most this many GPUs, or None where no rank has the memory."""
        return self._best[min(max(gpus, 0), len(self._best) - 1)]

    def least(self) -> int | None:
        """The smallest world that runs, or None."""
        return next((gpus for gpus, plan in enumerate(self._best) if plan is not None), None)

    def plan(self, shape: TrainingShape) -> TrainingPlan:
        """What this shape comes to, whether it fits or not."""
        return TrainingPlan(
            shape=shape,
            seconds=self._cost.seconds(shape, self._workload),
            memory_gib=self._cost.memory_gib(shape, self._longest),
            communication=self._cost.communication_ratio(shape, self._workload),
        )

    def fits(self, shape: TrainingShape) -> bool:
        """Whether each rank holds what it must."""
        held = self._cost.memory_gib(shape, self._longest)
        return held <= self._cost.facts.usable_gib

    @property
    def knows_memory(self) -> bool:
        """Whether the prices say how much memory a GPU has."""
        return self._cost.facts.gpu_gib < UNCHECKED_GIB

    def least_worker(self) -> int | None:
        """The smallest world of a gradient worker that has the memory, or None: a replica with
        its gradients, and no optimizer."""
        state = self._cost.facts.parameters * (SHARD_BYTES - WORKER_BYTES) / GIB
        usable = self._cost.facts.usable_gib
        for shape in self._shapes(len(self._best) - 1):
            if self._cost.memory_gib(shape, self._longest) - state / shape.gpus <= usable:
                return shape.gpus
        return None

    def refusal(self, gpus: int) -> NothingFits:
        """Why no world up to ``gpus`` runs, with the numbers of the best that was tried."""
        tried = [self._cost.memory_gib(shape, self._longest) for shape in self._shapes(gpus)]
        facts = self._cost.facts
        worlds = sorted({shape.gpus for shape in filter(self.fits, self._shapes(LARGEST))})
        least = f"the least that fits trains on {worlds[0]} GPUs; " if worlds else ""
        return NothingFits(
            "trainer memory",
            f"no trainer of up to {gpus} GPUs fits: a rank needs at least {min(tried):.1f} GiB "
            f"({facts.parameters / 1e9:.1f} billion parameters, trajectories of up to "
            f"{self._longest:,} tokens) and may use {facts.usable_gib:.1f}",
            hint=f"{least}give more, lower model.max_len or training.micro_batch_tokens",
        )

    def _solve(self, gpus: int) -> list[TrainingPlan | None]:
        lean: dict[int, TrainingPlan] = {}
        slow: dict[int, TrainingPlan] = {}
        for shape in filter(self.fits, self._shapes(gpus)):
            plan = self.plan(shape)
            kept = lean if plan.is_lean else slow
            if shape.gpus not in kept or plan.seconds < kept[shape.gpus].seconds:
                kept[shape.gpus] = plan
        best: list[TrainingPlan | None] = [None]
        fallback: TrainingPlan | None = None
        for world in range(1, gpus + 1):
            found = _faster(best[-1] if best[-1] is not fallback else None, lean.get(world))
            fallback = _faster(fallback, slow.get(world))
            best.append(found or fallback)
        return best

    def _shapes(self, gpus: int) -> Iterator[TrainingShape]:
        for tensor in self._degrees:
            for data in range(1, gpus // tensor + 1):
                yield TrainingShape(tensor, data)


def _faster(one: TrainingPlan | None, other: TrainingPlan | None) -> TrainingPlan | None:
    if one is None or other is None:
        return one or other
    return other if other.seconds < one.seconds else one
