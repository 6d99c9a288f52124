"""How many GPUs each half should have, and in what shapes: the least of the longer half.

The law: over every split of the budget, ``max(T_rollout, T_train)`` is least. Both are seconds *per
step* of a run in which the halves overlap: ``T_rollout`` is how long the servers need for one
step's trajectories when they are kept full (``rollout_table``), ``T_train`` how long an optimizer
step takes (``training_tree``). One table serves every split, so trying them all is a scan.

Of layouts within ``tolerance`` of the best a simple one is taken, and a plan of equal servers is
the simplest: it needs no scheduler to be right. A proposal says its reasons: both times, the
runner-up, what binds.

Guarantee: a proposal fits, every server's weights and KV cache and every rank's share, by the
profile; where nothing does, NothingFits names the constraint. Limit: as good as the prices; it
knows no nodes, only that shapes are powers of two, which pack into nodes of eight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from libra_cli.core.costs.profile import NothingFits, Profile
from libra_cli.core.costs.workload import Workload
from libra_cli.core.explanation import Binding, Constraint
from libra_cli.core.planning.rollout_dp import DEFAULT_SEATS, PlannedBucket, RolloutTable
from libra_cli.core.planning.training_table import TrainingPlan, TrainingTable
from libra_cli.core.types import Seconds


@dataclass(frozen=True, slots=True)
class Layout:
    """How many servers of each shape, short to long, and of ranks that train, one a GPU.

    ``colocated``: every GPU plays and then trains, in turn.
    """

    buckets: tuple[PlannedBucket, ...]
    training_gpus: int
    colocated: bool = False

    @property
    def rollout_gpus(self) -> int:
        """That serve."""
        return sum(bucket.gpus for bucket in self.buckets)

    @property
    def servers(self) -> dict[int, int]:
        """Servers by tensor-parallel degree."""
        counts: dict[int, int] = {}
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.tensor_parallel):
            degree = bucket.tensor_parallel
            counts[degree] = counts.get(degree, 0) + bucket.servers
        return counts

    def __str__(self) -> str:
        served = " + ".join(f"{number} x TP {degree}" for degree, number in self.servers.items())
        return f"rollout {self.rollout_gpus} GPUs ({served}), training {self.training_gpus}"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per step of the two halves; ``step_s`` of both together."""

    rollout_s: Seconds
    train_s: Seconds

    @property
    def step_s(self) -> Seconds:
        """The longer half: they overlap."""
        return max(self.rollout_s, self.train_s)

    def __str__(self) -> str:
        return f"rollout {self.rollout_s:.1f} s, training {self.train_s:.1f} s a step"


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What a planner may do.

    ``unit``: GPUs that change sides together. ``groups``: parts the trajectories are cut into.
    ``tolerance``: how much slower a simpler layout may be. ``mixed_gain``: by how much servers of
    several shapes must look better than equal ones; their rollout time is taken to be that much
    longer than the table says, which takes every trajectory to reach the bucket of its length. In
    the simulator (four traces, 12 and 24 GPUs) mixes came out 6 to 35 % further above the table
    than equal servers. ``one_bucket_a_shape``: servers of one shape are told apart by nothing that
    a scheduler sees, so they share one range of lengths; without, the table's ranges stay.
    """

    unit: int = 1
    max_num_seqs: int = DEFAULT_SEATS
    groups: int = 64
    tolerance: float = 0.03
    mixed_gain: float = 0.25
    one_bucket_a_shape: bool = True
    shapes: tuple[int, ...] = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The plan to have: a layout, its predicted times, what comes second, what binds, and why."""

    layout: Layout
    times: Times
    runner_up: tuple[Layout, Times] | None
    binding: Binding
    reasons: tuple[str, ...]

    @property
    def rollout_s(self) -> Seconds:
        """Of a step, predicted."""
        return self.times.rollout_s

    @property
    def train_s(self) -> Seconds:
        """Of a step, predicted."""
        return self.times.train_s

    @property
    def step_s(self) -> Seconds:
        """Of a step, predicted."""
        return self.times.step_s


FINALISTS = 6
"""Splits whose layouts are made simple before the best is chosen."""


def propose(
    profile: Profile, workload: Workload, gpus: int, settings: PlannerSettings | None = None
) -> Proposal:
    """The best plan for this workload on ``gpus`` GPUs. Raises NothingFits if none can run."""
    return Search(profile, workload, gpus, settings or PlannerSettings()).best()


class Search:
    """Everything that is known about one workload on one budget: both tables.

    Raises NothingFits if no plan can run.
    """

    def __init__(
        self, profile: Profile, workload: Workload, gpus: int, settings: PlannerSettings
    ) -> None:
        self.gpus = gpus
        self.workload = workload
        self._settings = settings
        servers = {
            degree: cost
            for degree, cost in profile.servers.items()
            if degree in settings.shapes and profile.serves(degree)
        }
        self.table = RolloutTable(
            servers,
            workload,
            gpus,
            max_num_seqs=settings.max_num_seqs,
            groups=settings.groups,
        )
        self.training = TrainingTable(profile.training, workload, gpus)
        self._splits = self._scan()

    @property
    def splits(self) -> tuple[int, ...]:
        """Numbers of GPUs for rollout with which both halves run."""
        return tuple(self._splits)

    def best(self) -> Proposal:
        """The best plan, with its reasons."""
        finalists = sorted(map(self.candidate, self._order()[:FINALISTS]), key=_by_step)
        layout, times = finalists[0]
        later = map(self.candidate, self._order()[FINALISTS:])
        others = (found for found in chain(finalists, later) if found[0] != layout)
        runner_up = next(others, None)
        binding = self.binding(layout)
        reasons = self._reasons(layout, times, runner_up, binding)
        return Proposal(layout, times, runner_up, binding, reasons)

    def candidate(self, split: int) -> tuple[Layout, Times]:
        """The best layout with ``split`` GPUs for rollout; raises KeyError if none can run."""
        unit = self._settings.unit
        training = self._splits[split][1]
        buckets = self._simple(split)
        spare = self.gpus - sum(bucket.gpus for bucket in buckets)
        training = self.training.best(spare // unit * unit) or training
        times = Times(self._rollout_s(buckets), training.seconds)
        return Layout(buckets, training.ranks), times

    def _rollout_s(self, buckets: tuple[PlannedBucket, ...]) -> Seconds:
        """What the table says, and for several shapes what a scheduler will miss of it."""
        shapes = {bucket.tensor_parallel for bucket in buckets}
        missed = self._settings.mixed_gain if len(shapes) > 1 else 0.0
        return self.table.buckets_s(buckets) * (1 + missed)

    def _simple(self, split: int) -> tuple[PlannedBucket, ...]:
        """Equal servers where no mix looks better, else the simplest mix within the tolerance."""
        equal = self.uniform(split)
        enough = self._splits[split][1].seconds
        if self.table.buckets_s(equal) <= max(enough, self._splits[split][0]):
            return equal
        mix = self.table.buckets(split, self._slack(split))
        if self._settings.one_bucket_a_shape:
            mix = self.table.boundaries(_by_shape(mix))
        return mix if self._rollout_s(mix) < self.table.buckets_s(equal) else equal

    def candidates(self, within: float) -> list[tuple[Layout, Times]]:
        """The best layout of each split whose step is at most ``1 + within`` times the best."""
        order = self._order()
        limit = self._step(order[0]) * (1 + within)
        return [self.candidate(split) for split in order if self._step(split) <= limit]

    def times(self, layout: Layout) -> Times:
        """Of any layout; infinity where a half does not fit."""
        fits = self.training.fits(layout.training_gpus)
        train_s = self.training.plan(layout.training_gpus).seconds if fits else float("inf")
        rollout_s = self._rollout_s(layout.buckets)
        if layout.colocated:
            return Times(rollout_s + train_s, rollout_s + train_s)
        return Times(rollout_s, train_s)

    def binding(self, layout: Layout) -> Binding:
        """The one constraint without which a step on this layout would be shorter."""
        plan = self.training.plan(layout.training_gpus)
        if not self.training.fits(layout.training_gpus):
            words = f"each of {layout.training_gpus} ranks would need {plan.memory_gib:.0f} GiB"
            return Binding(Constraint.TRAINER_MEMORY, words)
        if self._rollout_s(layout.buckets) >= plan.seconds:
            return self._binding_of_rollout(layout)
        return self._binding_of_training(plan)

    def uniform(self, split: int) -> tuple[PlannedBucket, ...]:
        """The best equal servers on ``split`` GPUs."""
        longest = max(sample.generated for sample in self.workload.samples)
        seats = self._settings.max_num_seqs
        options = {degree: split // degree for degree in self.table.degrees if degree <= split}
        best = min(options, key=lambda degree: self.table.equal_s(degree, options[degree]))
        return (PlannedBucket(best, options[best], longest, seats),)

    def _scan(self) -> dict[int, tuple[Seconds, TrainingPlan]]:
        splits: dict[int, tuple[Seconds, TrainingPlan]] = {}
        for split in range(self._settings.unit, self.gpus, self._settings.unit):
            training = self.training.best(self.gpus - split)
            rollout_s = self._least_s(split) if training is not None else float("inf")
            if training is not None and rollout_s < float("inf"):
                splits[split] = (rollout_s, training)
        if not splits:
            raise self._refusal()
        return splits

    def _least_s(self, split: int) -> Seconds:
        """Of the best equal servers or the best mix."""
        equal = (
            self.table.equal_s(degree, split // degree)
            for degree in self.table.degrees
            if degree <= split
        )
        mixed = self.table.seconds(split) * (1 + self._settings.mixed_gain)
        return min([mixed, *equal])

    def _refusal(self) -> NothingFits:
        training = self.training.least()
        if training is None:
            return self.training.refusal(self.gpus)
        budgets = range(1, self.gpus + 1)
        serving = next(g for g in budgets if self.table.seconds(g) < float("inf"))
        return NothingFits(
            "GPUs",
            f"{self.gpus} GPUs are too few: the smallest trainer that fits has {training} and the "
            f"smallest server {serving}",
            hint=f"give at least {training + serving} GPUs, in units of {self._settings.unit}",
        )

    def _step(self, split: int) -> Seconds:
        rollout_s, training = self._splits[split]
        return max(rollout_s, training.seconds)

    def _order(self) -> list[int]:
        """Splits, best first; of equals the one with more slack in the shorter half."""

        def key(split: int) -> tuple[Seconds, Seconds]:
            rollout_s, training = self._splits[split]
            return self._step(split), rollout_s + training.seconds

        return sorted(self._splits, key=key)

    def _slack(self, split: int) -> float:
        """A simpler layout may use up what the trainer needs anyway, and the tolerance."""
        _, training = self._splits[split]
        mixed_s = self.table.seconds(split) * (1 + self._settings.mixed_gain)
        return max(self._settings.tolerance, training.seconds / mixed_s - 1)

    def _binding_of_rollout(self, layout: Layout) -> Binding:
        """More GPUs would help, unless one trajectory or the rule binds; training may need all."""
        found = self.table.binding(layout.buckets)
        fewer = layout.training_gpus - self._settings.unit
        if (
            found.constraint in (Constraint.LONGEST_TRAJECTORY, Constraint.STALENESS)
            or fewer < 1
            or self.training.best(fewer) is not None
        ):
            return found
        ranks = f"its memory takes {layout.training_gpus} GPUs"
        return Binding(Constraint.TRAINER_MEMORY, f"{found}; training can give none: {ranks}")

    def _binding_of_training(self, plan: TrainingPlan) -> Binding:
        words = (
            f"training: arithmetic, {plan.communication:.0%} as much communication beside it, "
            f"{plan.memory_gib:.0f} GiB a rank"
        )
        longer = Constraint.NETWORK if plan.communication > 1 else Constraint.TRAINING
        return Binding(longer, words)

    def _reasons(
        self,
        layout: Layout,
        times: Times,
        runner_up: tuple[Layout, Times] | None,
        binding: Binding,
    ) -> tuple[str, ...]:
        workload = self.workload
        most = max(sample.generated for sample in workload.samples)
        work = (
            f"{workload.trajectories} trajectories a step, {workload.mean_generated:,.0f} tokens "
            f"generated on average and up to {most:,}, on {self.gpus} GPUs"
        )
        reasons = [f"{work}: {layout}", f"predicted {times}; {binding}"]
        uniform = self.uniform(layout.rollout_gpus)
        if len(layout.buckets) > 1:
            reasons.append(
                f"the best equal servers there, {uniform[0].servers} x TP "
                f"{uniform[0].tensor_parallel}, would take {self.table.buckets_s(uniform):.1f} s"
            )
        elif len(layout.buckets) == 1:
            gain = self._settings.mixed_gain
            reasons.append(f"equal servers: no mix of shapes looks better by {gain:.0%}")
        if runner_up is not None:
            reasons.append(f"runner-up: {runner_up[0]}: {runner_up[1]}")
        idle = self.gpus - layout.rollout_gpus - layout.training_gpus
        if idle > 0:
            reasons.append(f"{idle} GPUs left over: no shape makes use of them")
        return tuple(reasons)


def _by_shape(buckets: tuple[PlannedBucket, ...]) -> tuple[PlannedBucket, ...]:
    """One bucket a shape, small servers first."""
    joined: dict[int, PlannedBucket] = {}
    for bucket in sorted(buckets, key=lambda bucket: bucket.tensor_parallel):
        held = joined.get(bucket.tensor_parallel)
        servers = bucket.servers + (held.servers if held else 0)
        joined[bucket.tensor_parallel] = replace(bucket, servers=servers)
    return tuple(joined.values())


def _by_step(found: tuple[Layout, Times]) -> tuple[Seconds, int]:
    return found[1].step_s, len(found[0].buckets)
