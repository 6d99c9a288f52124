"""How fast any number of GPUs can train a step, a rank on each: sharded data parallelism.

Guarantee: ``best(gpus)`` is the fastest world left of all with at most that many GPUs whose ranks
hold what they must, and never slower with more of them. The published planner searches a tree of
tensor, pipeline and expert parallelism (Libra, arXiv 2606.03077); the trainer here has none of
them, so one level of it is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from libra_cli.core.costs.observed import UNCHECKED_GIB
from libra_cli.core.costs.profile import NothingFits, TrainingCost
from libra_cli.core.types import Seconds, Tokens
from libra_cli.core.workload import Workload


def together_s(alone_s: Seconds, workers: Iterable[tuple[Seconds, Seconds]]) -> Seconds:
    """Seconds until a step is computed that takes the trainer ``alone_s``, with workers: of each
    those in which its version is loaded and its gradients travel, and those it would take to
    compute all of the step."""
    work, rate = 1.0, 1 / alone_s
    for transfer_s, worker_s in sorted(workers):
        if transfer_s >= work / rate:
            break
        work += transfer_s / worker_s
        rate += 1 / worker_s
    return work / rate


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A number of ranks and what it comes to: a step's seconds, a rank's memory in GiB, the seconds
    of communication for each second of arithmetic, and how many ranks share a forward pass."""

    ranks: int
    seconds: Seconds
    memory_gib: float
    communication: float
    sharing: int = 1


@dataclass(frozen=True, slots=True)
class TrainedRanks:
    """The ranks of a base group and of each gradient worker that have trained trajectories of up to
    ``longest`` tokens."""

    base: int = 0
    workers: tuple[int, ...] = ()
    longest: Tokens = 0


WORKER_BYTES = 8
"""Bytes of a parameter in a gradient worker: float32 weight and
gradient (as in ``node.model.policy``).
"""
SMALLER = 0.02
"""Share by which a step may be longer for a base group that leaves more GPUs free to change sides.
As much as plans may differ and count as equal (``Admission.tolerance``).
"""
LARGEST = 256
"""GPUs up to which the least world that fits is looked for when none does."""


class TrainingTable:
    """The fastest world for every budget up to ``gpus``.

    What has ``trained`` in the run fits, also where the law of memory has it that it cannot.
    """

    def __init__(
        self,
        cost: TrainingCost,
        workload: Workload,
        gpus: int,
        trained: TrainedRanks | None = None,
    ) -> None:
        self._cost = cost
        self._workload = workload
        self._trained = trained or TrainedRanks()
        self._longest = workload.longest.context
        self.gpus = gpus
        self._best = self._solve(gpus)

    def best(self, gpus: int) -> TrainingPlan | None:
        """The fastest with at most this many GPUs, or None where no rank has the memory."""
        return self._best[min(max(gpus, 0), len(self._best) - 1)]

    def least(self) -> int | None:
        """Return the fewest GPUs that a training world fits on; None if none does."""
        return next((gpus for gpus, plan in enumerate(self._best) if plan is not None), None)

    def plan(self, ranks: int) -> TrainingPlan:
        """Return the times and memory of a world of ``ranks``, whether they fit or not."""
        return TrainingPlan(
            ranks=ranks,
            seconds=self._cost.seconds(ranks, self._workload),
            memory_gib=self._cost.memory_gib(ranks, self._longest),
            communication=self._cost.communication_ratio(ranks, self._workload),
            sharing=self._cost.sharing(ranks, self._longest),
        )

    def seconds(self, gpus: int, workers: Sequence[int] = ()) -> Seconds:
        """Seconds of a step on so many GPUs, of which gradient workers have those that are told."""
        base = gpus - sum(workers)
        alone_s = self._cost.seconds(base, self._workload)
        if not workers or not self._cost.shared:
            return alone_s
        cost, lag_s = self._cost, self._cost.lag_s
        shared_s = cost.shared * cost.busy_s(base, self._workload)
        each = [cost.shared * cost.of_worker.busy_s(one, self._workload) for one in workers]
        return alone_s - shared_s + together_s(shared_s, [(lag_s, one) for one in each])

    def base_group(self, gpus: int, least: int, node: int) -> int:
        """Ranks of the base group to begin with where ``gpus`` train on nodes of ``node``.

        What is not in it can change sides at once, so it is the smallest of ``least`` or more ranks
        and of whole nodes with which a step is no more than ``SMALLER`` longer than with the best:
        workers send their gradients over the network, which the base group need not. GPUs on which
        a worker would lack the memory are worth nothing beside it.
        """
        sizes: list[int] = sorted({min(gpus, least), *range(node, gpus, node), gpus})
        steps = {}
        for base in sizes:
            if base >= min(gpus, least):
                left = [min(node, gpus - at) for at in range(base, gpus, node)]
                workers = list(filter(self.worker_fits, left))
                steps[base] = self.seconds(base + sum(workers), workers)
        limit_s = min(steps.values()) * (1 + SMALLER)
        return next(base for base in sizes if steps.get(base, inf) <= limit_s)

    def unpaid(self, base: int) -> str:
        """Why no gradient worker can help so many ranks; empty if one can."""
        if not self._cost.shared:
            return "steps of this recipe cannot be shared"
        busy_s = self._cost.shared * self._cost.busy_s(base, self._workload)
        transfer_s = self._cost.transfer_s
        if transfer_s < busy_s:
            return ""
        what = "a step" if self._cost.shared == 1 else "the first update of a step"
        size = self._cost.gradient_bytes * self._cost.facts.parameters / 1e9
        return (
            f"the gradients of a gradient worker are {size:.1f} GB, {transfer_s:.1f} s at "
            f"{self._cost.link_bandwidth / 1e9:.2g} GB/s, and {base} ranks compute {what} in "
            f"{busy_s:.1f} s"
        )

    def fits(self, ranks: int) -> bool:
        """Whether each of ``ranks`` ranks has the memory for its share."""
        return self._has_memory(self._cost, ranks, (self._trained.base,))

    def worker_fits(self, ranks: int) -> bool:
        """Whether a gradient worker of ``ranks`` ranks has the memory: for a replica with its
        gradients, and no optimizer."""
        return self._has_memory(self._cost.of_worker, ranks, self._trained.workers)

    def lacking(self, base: int, workers: Iterable[int] = ()) -> str:
        """Say which ranks of a base group with these gradient workers lack memory, and how much
        each would need; empty where all have it."""
        if not self.fits(base):
            needed = self._cost.memory_gib(base, self._longest)
            return f"each of {base} ranks would need {needed:.0f} GiB"
        small = next((ranks for ranks in workers if not self.worker_fits(ranks)), None)
        if small is None:
            return ""
        needed = self._cost.of_worker.memory_gib(small, self._longest)
        return f"each of the {small} ranks of a gradient worker would need {needed:.0f} GiB"

    def _has_memory(self, cost: TrainingCost, ranks: int, trained: Collection[int]) -> bool:
        usable = cost.facts.usable_gib
        if cost.memory_gib(ranks, self._longest) <= usable:
            return True
        # A plan that runs has shown that it fits. Where the law denies that of what these ranks
        # have trained, it is wrong of them, and so not asked about longer trajectories either;
        # where it agrees, it is, for contexts may outgrow a plan that runs.
        return ranks in trained and cost.memory_gib(ranks, self._trained.longest) > usable

    @property
    def knows_memory(self) -> bool:
        """Whether the prices say how much memory a GPU has."""
        return self._cost.facts.gpu_gib < UNCHECKED_GIB

    def least_worker(self) -> int | None:
        """The smallest world of a gradient worker that has the memory, or None."""
        return next(filter(self.worker_fits, range(1, len(self._best))), None)

    def refusal(self, gpus: int) -> NothingFits:
        """Why no world up to ``gpus`` runs, with the numbers of the best that was tried."""
        facts = self._cost.facts
        needed = self._cost.memory_gib(max(1, gpus), self._longest)
        worlds = list(filter(self.fits, range(1, LARGEST + 1)))
        least = f"the least that fits trains on {worlds[0]} GPUs; " if worlds else ""
        return NothingFits(
            "trainer memory",
            f"no trainer of up to {gpus} GPUs fits: a rank needs at least {needed:.1f} GiB "
            f"({facts.parameters / 1e9:.1f} billion parameters, trajectories of up to "
            f"{self._longest:,} tokens) and may use {facts.usable_gib:.1f}",
            hint=f"{least}give more, lower model.max_len or training.micro_batch_tokens",
        )

    def _solve(self, gpus: int) -> list[TrainingPlan | None]:
        best: list[TrainingPlan | None] = [None]
        for ranks in range(1, gpus + 1):
            found = self.plan(ranks) if self.fits(ranks) else None
            kept = best[-1]
            faster = found is not None and (kept is None or found.seconds < kept.seconds)
            best.append(found if faster else kept)
        return best
