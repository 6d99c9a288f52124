"""How many GPUs each half should have, and in what servers: the least of the longer half.

The law: over every split of the budget the longer of ``T_rollout`` and ``T_train``, a little more
where they are alike (``TURNS``), is least. Both are seconds *per step*: ``T_train`` is how long an
optimizer step takes (``training_table``), ``T_rollout`` how long the servers need for one step's
trajectories with what the staleness rule admits beside a training step as long as that
(``rollout_table``). At ``max_staleness: 0`` the halves take turns, and a step is their sum. Both
tables are made once for all splits, so trying every shape of server on every split is a scan.

How well it orders plans: of 215 static plans simulated on traces, or profiles of one, that nothing
was fitted on (48 comparisons of two to six, bounds 0 to 4, hold, cut and token), the one that it
finds best had 0.7 % less throughput than the best in the mean and 8.4 % at most; as the 8-norm of
halves that always overlap it was 2.1 and 17.5 %. It is 6 % off in the mean, 12 % so.

Servers are of one shape, of several (the published planner, Libra, arXiv 2606.03077, searches such
mixtures with a dynamic program, ``mixture_table``), or whatever has the shorter step. The table
takes every trajectory to reach the bucket of its length, so mixtures cost ``MISSED`` more. A
proposal says its reasons: both times, the runner-up, what binds.

Guarantee: a proposal fits, every server's weights and KV cache and every rank's share, by the
profile; where nothing does, NothingFits names the constraint. Limit: as good as the prices; it
knows no nodes, only that shapes are powers of two, which pack into nodes of eight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from libra_cli.config.rollout import Shapes
from libra_cli.core.costs.profile import NothingFits, Profile
from libra_cli.core.explanation import Binding, Constraint
from libra_cli.core.planning.idle_servers import IdleServers, with_idle_servers
from libra_cli.core.planning.mixture_table import best_mixtures
from libra_cli.core.planning.rollout_table import DEFAULT_SEATS, PlannedBucket, RolloutTable
from libra_cli.core.planning.training_table import TrainedRanks, TrainingPlan, TrainingTable
from libra_cli.core.types import Seconds
from libra_cli.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Layout:
    """Servers of each shape, short to long, and the number of training ranks, one a GPU.

    ``colocated``: every GPU plays and then trains, in turn. ``workers`` are the GPUs of each
    gradient worker, which are among those that train. ``idle`` are servers on GPUs that train,
    which take requests while the trainer waits. ``models`` are the servers of each frozen model.
    """

    buckets: tuple[PlannedBucket, ...]
    training_gpus: int
    colocated: bool = False
    workers: tuple[int, ...] = ()
    idle: tuple[IdleServers, ...] = ()
    models: tuple[tuple[str, int], ...] = ()

    @property
    def rollout_gpus(self) -> int:
        """GPUs of all rollout servers that are not the trainer's."""
        return sum(bucket.gpus for bucket in self.buckets)

    @property
    def base_gpus(self) -> int:
        """GPUs of the trainer's base group, whose ranks share a replica; a gradient worker has one
        of its own."""
        return self.training_gpus - sum(self.workers)

    @property
    def servers(self) -> dict[int, int]:
        """Numbers of servers, by tensor-parallel degree."""
        counts: dict[int, int] = {}
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.tensor_parallel):
            degree = bucket.tensor_parallel
            counts[degree] = counts.get(degree, 0) + bucket.servers
        return counts

    @property
    def served(self) -> str:
        """The servers in words."""
        return " + ".join(f"{number} x TP {degree}" for degree, number in self.servers.items())

    def __str__(self) -> str:
        served = self.served
        beside = " + ".join(f"{one.number} x TP {one.tensor_parallel}" for one in self.idle)
        parts = [f"rollout {self.rollout_gpus} GPUs ({served})"] if served else []
        parts.append(f"training {self.training_gpus}")
        parts += [f"{beside} there while it waits"] if beside else []
        parts += [f"{number} x {name}" for name, number in self.models]
        return ", ".join(parts)


TURNS = 8.0
"""Exponent of the norm of both halves' seconds that is a step's: where they are equally long, now
the one waits and now the other. Simulated without drift such steps were 6 to 13 % longer than
either half (tau2 and mint, 24 GPUs), and where one half had a fifth of slack level with the other;
2^(1/8) is 9 %, and (1 + 0.8^8)^(1/8) 2 %."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per step of the two halves; ``step_s`` of both together.

    ``in_turn``: each begins when the other has ended, as on the same GPUs or at a bound of 0.
    """

    rollout_s: Seconds
    train_s: Seconds
    in_turn: bool = False

    @property
    def step_s(self) -> Seconds:
        """The longer half where they overlap, and more the more equal they are (``TURNS``); the
        sum where they take turns."""
        longer, shorter = max(self.rollout_s, self.train_s), min(self.rollout_s, self.train_s)
        if not 0 < longer < inf:
            return longer
        exponent = 1.0 if self.in_turn else TURNS
        return float(longer * (1 + (shorter / longer) ** exponent) ** (1 / exponent))

    def __str__(self) -> str:
        return f"rollout {self.rollout_s:.1f} s, training {self.train_s:.1f} s a step"


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """The limits of a planner's choice.

    ``groups``: parts the trajectories are cut into where unlike servers share them. ``degrees``:
    tensor-parallel degrees of servers. ``shapes``: whether a plan's servers are of one degree, of
    several where any such fit, or whatever has the shorter step.
    """

    max_num_seqs: int = DEFAULT_SEATS
    groups: int = 64
    degrees: tuple[int, ...] = (1, 2, 4, 8)
    shapes: Shapes = "alike"


@dataclass(frozen=True, slots=True)
class Proposal:
    """The plan to have: a layout, its predicted times, what comes second, what binds, and why."""

    layout: Layout
    times: Times
    runner_up: tuple[Layout, Times] | None
    binding: Binding
    reasons: tuple[str, ...]


MISSED, MISSED_ALONE = 0.06, 0.14
"""Shares by which rollout on unlike servers is taken to be slower than their table says, and where
each batch is played alone. In the simulator its steps were further above the table's, beside those
of alike servers, by 3.5 % with a standard deviation of 2.8 over 12 conditions at bounds 1 to 4, and
by 9 and 4.7 % over three at a bound of 0; chosen is the mean and one deviation (48 A800, shipped
prices, three seeds each: ``tests.research.mixed_servers``).
"""


ALIKE = 0.03
"""Plans whose steps are by so much longer than the least are as good, for what is known beforehand,
and the one with the largest servers of these is proposed, which work that turns out longer slows
least: on 8 and on 12 of 24 GPUs servers of four had 1 to 10 % more throughput than twice as many of
two (seven static plans each in the simulator, with drift)."""


def propose(
    profile: Profile, workload: Workload, gpus: int, settings: PlannerSettings | None = None
) -> Proposal:
    """The best plan for this workload on ``gpus`` GPUs. Raises NothingFits if none can run."""
    return Search(profile, workload, gpus, settings or PlannerSettings()).best()


COARSE = 24
"""Parts that trajectories are cut into where mixtures are looked for."""
REACH = 2.0
"""Mixtures are looked for beside training steps of at most so many of the best plan's steps."""


HEDGED = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Factors of the lengths that a first plan reckons with: nobody knows how long trajectories are
before they are played, nor how long they will be. Chosen."""
LARGE = 4
"""GPUs of a server up to which a larger one is better of plans that are as good beforehand. With 4
in place of 2 a run had 2.4 % more throughput at a bound of 4 (30 pairs: five traces, with and
without drift); with 8 in place of 4 it had 3.0 % less at a bound of 1 (six pairs, moatless)."""
LEVEL = 0.01
"""Share of a step by which a mixture has to be better than alike servers at least. Chosen."""


def least_regret(
    layouts: Sequence[Layout],
    profile: Profile,
    workload: Workload,
    gpus: int,
    settings: PlannerSettings,
) -> Layout:
    """Return the one of these layouts of which the most that may be lost is the least.

    Lost is the share by which its steps are longer than the best one's, if trajectories turn out
    one of ``HEDGED`` times as long as ``workload`` has them and anything can run then. Servers of
    one shape are level with a mixture that would lose less by a ``LEVEL``, and are chosen. Of those
    that lose no more than ``ALIKE`` beside the least of them, servers of up to ``LARGE`` GPUs are
    chosen for their size.
    """
    losses = [0.0] * len(layouts)
    for factor in HEDGED:
        try:
            search = Search(profile, workload.stretched(factor), gpus, settings)
        except NothingFits:
            continue
        known = {_shape(layout): times.step_s for layout, times in search.layouts()}
        least = min(known.values())
        for at, layout in enumerate(layouts):
            step_s = known.get(_shape(layout)) or search.times(layout).step_s
            losses[at] = max(losses[at], step_s / least)
    best = min(losses)
    alike = [at for at, layout in enumerate(layouts) if len(layout.servers) == 1]
    least = min((losses[at] for at in alike), default=inf)
    if least > best * (1 + LEVEL):
        return layouts[losses.index(best)]
    good = [at for at in alike if losses[at] <= least * (1 + ALIKE)]
    return layouts[max(good, key=lambda at: (min(max(layouts[at].servers), LARGE), -losses[at]))]


def _shape(layout: Layout) -> tuple[object, ...]:
    servers = tuple(layout.servers.items())
    return servers, layout.training_gpus, layout.workers, layout.colocated, layout.idle


class Search:
    """Everything that is known about one workload on one budget: both tables.

    Where lengths change, training has the work that has ``ended``. What has ``trained`` fits, as
    the run has shown. Raises NothingFits if no plan can run.
    """

    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        gpus: int,
        settings: PlannerSettings,
        ended: Workload | None = None,
        trained: TrainedRanks | None = None,
    ) -> None:
        self.gpus = gpus
        self.workload = workload
        self._longest = max(sample.generated for sample in workload.samples)
        self._settings = settings
        self._served: dict[tuple[tuple[str, int], ...], Search] = {}
        self.profile, self._ended, self._trained = profile, ended or workload, trained
        servers = {
            degree: cost
            for degree, cost in profile.servers.items()
            if degree in settings.degrees and profile.serves(degree)
        }
        self.training = TrainingTable(profile.training, self._ended, gpus, trained)
        self._left = [self.training.best(spare) for spare in range(gpus + 1)]
        self.table = RolloutTable(
            servers,
            workload,
            gpus,
            max_num_seqs=settings.max_num_seqs,
            groups=settings.groups,
            left_s=[0.0 if plan is None else plan.seconds for plan in self._left],
        )
        self.alike = list(self._equal())
        if all(times.step_s == inf for _, times in self.alike):
            raise self._refusal()

    def served_by(self, models: tuple[tuple[str, int], ...]) -> Search:
        """Return the same where frozen models have so many servers, and trajectories wait for them
        accordingly."""
        if models in self._served:
            return self._served[models]
        work = self.workload.served_by(dict(models))
        if work is self.workload:
            return self
        ended = self._ended.served_by(dict(models))
        self._served[models] = Search(
            self.profile, work, self.gpus, self._settings, ended, self._trained
        )
        return self._served[models]

    def best(self) -> Proposal:
        """Return the plan with the shortest step, and its reasons."""
        (layout, times), *others = self._scan()
        runner_up = others[0] if others else None
        binding = self.binding(layout)
        reasons = self._reasons(layout, times, runner_up, binding)
        return Proposal(layout, times, runner_up, binding, reasons)

    def layouts(self) -> list[tuple[Layout, Times]]:
        """The plans to choose from, with their times: alike servers, mixtures, or both."""
        shapes = self._settings.shapes
        if shapes == "alike":
            return self.alike
        return self.alike * (shapes == "auto" or not self.mixed) + self.mixed

    @cached_property
    def mixed(self) -> list[tuple[Layout, Times]]:
        """The best mixtures of unlike servers, on the numbers of GPUs where they do best."""
        limit = REACH * min(times.step_s for _, times in self.alike)
        train_s = {
            self.gpus - spare: plan.seconds
            for spare, plan in enumerate(self._left)
            if plan is not None and plan.seconds <= limit and spare < self.gpus
        }
        coarse = RolloutTable(
            {degree: self.profile.servers[degree] for degree in self.table.degrees},
            self.workload,
            self.gpus,
            max_num_seqs=self._settings.max_num_seqs,
            groups=COARSE,
        )
        layouts = [
            self._mixture(gpus, servers, train_s[gpus])
            for gpus, servers in best_mixtures(coarse, train_s)
        ]
        return [(layout, self.times(layout)) for layout in layouts]

    def compared(self, chosen: Layout) -> str:
        """Say what the best mixture takes beside the best alike servers; empty where the search is
        for alike ones alone."""
        if self._settings.shapes == "alike":
            return ""
        if not self.mixed:
            return "alike: no servers of two shapes fit beside the trainer"
        alike_s, mixed_s = (
            min(times.step_s for _, times in some) for some in (self.alike, self.mixed)
        )
        if len(chosen.servers) > 1:
            mixed_s = self.times(chosen).step_s
            return f"mixed {chosen.served}: {mixed_s:.1f} s a step against {alike_s:.1f} s alike"
        gain = alike_s / mixed_s - 1
        return f"alike: mixtures would {'gain' if gain > 0 else 'lose'} {abs(gain):.1%}"

    def _mixture(self, gpus: int, servers: tuple[tuple[int, int], ...], train_s: Seconds) -> Layout:
        buckets = tuple(self._bucket(degree, number) for degree, number in servers)
        training = self._left[self.gpus - gpus]
        assert training is not None, "mixtures are looked for where the trainer fits"
        return Layout(self.table.boundaries(buckets, train_s), training.ranks)

    def _equal(self) -> Iterator[tuple[Layout, Times]]:
        """Equal servers of every shape in every number that leave enough to train on."""
        for degree in self.table.degrees:
            for servers in range(1, self.gpus // degree + 1):
                spare = self.gpus - degree * servers
                if (training := self._left[spare]) is not None:
                    rollout_s = self.table.equal_s(degree, servers)
                    layout = Layout((self._bucket(degree, servers),), training.ranks)
                    yield layout, self._times(rollout_s, training.seconds)

    def times(self, layout: Layout) -> Times:
        """Seconds of the halves of any layout; infinity where a half does not fit."""
        if self.training.lacking(layout.base_gpus, layout.workers):
            return self._times(self.rollout_s(layout.buckets, 0.0), inf)
        train_s = self.train_s(layout)
        rollout_s = self.rollout_s(self.serving(layout, train_s), train_s)
        times = self._times(self.playing_s(rollout_s, layout), train_s)
        in_turn = times.in_turn or layout.colocated or not layout.buckets
        return replace(times, in_turn=in_turn)

    def train_s(self, layout: Layout) -> Seconds:
        """Seconds of training a step, by ranks that have what servers leave of their GPUs."""
        training = self.training
        if layout.idle:
            least = min(one.ranks for one in layout.idle)
            training = TrainingTable(self.profile.training.within(least), self._ended, 0)
        return training.seconds(layout.training_gpus, layout.workers)

    def serving(self, layout: Layout, train_s: Seconds) -> tuple[PlannedBucket, ...]:
        """The layout's servers beside so long a training step, with what those are worth that take
        requests while the trainer waits."""
        if not layout.idle:
            return layout.buckets

        def step_s(buckets: tuple[PlannedBucket, ...]) -> Seconds:
            return self._times(self.rollout_s(buckets, train_s), train_s).step_s

        return with_idle_servers(
            layout.buckets, layout.idle, self.profile, self.table, step_s, train_s
        )

    def rollout_s(self, buckets: tuple[PlannedBucket, ...], train_s: Seconds) -> Seconds:
        """Rollout seconds of a step, beside so long a training step: what the table says, and for
        several shapes what it misses of them.
        """
        shapes = {bucket.tensor_parallel for bucket in buckets}
        missed = MISSED_ALONE if self.workload.takes_turns else MISSED
        return self.table.buckets_s(buckets, train_s) * (1 + missed * (len(shapes) > 1))

    def playing_s(self, rollout_s: Seconds, layout: Layout) -> Seconds:
        """Seconds in which trajectories of a step are played, of which servers need ``rollout_s``
        and frozen models what is asked of them: the longest, and more the more equal they are."""
        every = [rollout_s, *(seconds for _, seconds in self._models_s(layout))]
        longest = max(every)
        if not 0 < longest < inf:
            return longest
        return longest * float(sum((one / longest) ** TURNS for one in every) ** (1 / TURNS))

    def _models_s(self, layout: Layout) -> list[tuple[str, Seconds]]:
        """The least seconds of a step by each frozen model; a layout that names none has those
        that there are."""
        servers = dict(layout.models)
        return [
            (one.model, one.step_s(servers.get(one.model, one.servers)))
            for one in self.workload.models
        ]

    def _times(self, rollout_s: Seconds, train_s: Seconds) -> Times:
        return Times(rollout_s, train_s, in_turn=self.workload.takes_turns)

    def binding(self, layout: Layout) -> Binding:
        """Return the constraint without which a step on this layout would be shorter."""
        if lacking := self.training.lacking(layout.base_gpus, layout.workers):
            return Binding(Constraint.TRAINER_MEMORY, lacking)
        train_s = self.train_s(layout)
        rollout_s = self.rollout_s(self.serving(layout, train_s), train_s)
        name, asked_s = max(self._models_s(layout), key=lambda one: one[1], default=("", 0.0))
        if asked_s > max(rollout_s, train_s):
            words = f"its servers have requests for {asked_s:.1f} s of a step"
            return Binding(Constraint.MODELS, f"model {name}: {words}")
        if rollout_s >= train_s:
            return self._binding_of_rollout(layout)
        if layout.workers and (why := self.training.unpaid(layout.base_gpus)):
            return Binding(Constraint.NETWORK, f"gradient workers do not pay: {why}")
        return self._binding_of_training(self.training.plan(layout.base_gpus))

    def uniform(self, split: int) -> tuple[PlannedBucket, ...]:
        """Return the best equal servers on ``split`` GPUs."""
        options = {degree: split // degree for degree in self.table.degrees if degree <= split}
        best = min(options, key=lambda degree: self.table.equal_s(degree, options[degree]))
        return (self._bucket(best, options[best]),)

    def _bucket(self, degree: int, servers: int) -> PlannedBucket:
        return PlannedBucket(degree, servers, self._longest, self._settings.max_num_seqs)

    def _scan(self) -> list[tuple[Layout, Times]]:
        """The best layout of every split, best first, after the one to propose; of equals the one
        with more slack."""
        splits: dict[int, list[tuple[Layout, Times]]] = {}
        for layout, times in self.layouts():
            if times.step_s < inf:
                splits.setdefault(layout.rollout_gpus, []).append((layout, times))
        best = {split: _of_alike(found) for split, found in splits.items()}
        first = _of_alike(list(best.values()))
        return sorted(best.values(), key=lambda one: (one is not first, *_step_and_slack(one)))

    def _refusal(self) -> NothingFits:
        training = self.training.least()
        if training is None:
            return self.training.refusal(self.gpus)
        serving = next(d for d in self.table.degrees if self.table.equal_s(d, 1) < inf)
        return NothingFits(
            "GPUs",
            f"{self.gpus} GPUs are too few: the smallest trainer that fits has {training} and the "
            f"smallest server {serving}",
            hint=f"give at least {training + serving} GPUs",
        )

    def _binding_of_rollout(self, layout: Layout) -> Binding:
        """More GPUs would help, unless one trajectory or the rule binds; training may need all."""
        train_s = self.train_s(layout)
        found = self.table.binding(self.serving(layout, train_s), train_s)
        fewer = layout.training_gpus - 1
        if (
            found.constraint in (Constraint.LONGEST_TRAJECTORY, Constraint.STALENESS)
            or fewer < 1
            or self.training.best(fewer) is not None
        ):
            return found
        ranks = f"its memory takes {layout.training_gpus} GPUs"
        return Binding(Constraint.TRAINER_MEMORY, f"{found}; training can give none: {ranks}")

    def _binding_of_training(self, plan: TrainingPlan) -> Binding:
        shared = f", {plan.sharing} ranks share a forward pass" if plan.sharing > 1 else ""
        words = (
            f"training: arithmetic, {plan.communication:.0%} as much communication beside it, "
            f"{plan.memory_gib:.0f} GiB a rank{shared}"
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
        work = (
            f"{workload.trajectories} trajectories a step, {workload.mean_generated:,.0f} tokens "
            f"generated on average and up to {self._longest:,}, on {self.gpus} GPUs"
        )
        reasons = [f"{work}: {layout}", f"predicted {times}; {binding}"]
        if runner_up is not None:
            reasons.append(f"runner-up: {runner_up[0]}: {runner_up[1]}")
        idle = self.gpus - layout.rollout_gpus - layout.training_gpus
        if idle > 0:
            reasons.append(f"{idle} GPUs left over: no shape makes use of them")
        return tuple(reasons)


def _of_alike(found: list[tuple[Layout, Times]]) -> tuple[Layout, Times]:
    """Return, of those as good as the best, the one with the fewest shapes, then the largest
    servers."""
    limit = min(times.step_s for _, times in found) * (1 + ALIKE)
    good = [one for one in found if one[1].step_s <= limit]
    return max(good, key=lambda one: (-len(one[0].servers), max(one[0].servers), -one[1].step_s))


def _step_and_slack(found: tuple[Layout, Times]) -> tuple[Seconds, Seconds]:
    times = found[1]
    return times.step_s, times.rollout_s + times.train_s
