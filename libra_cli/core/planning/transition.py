"""From one layout to another: which servers stop and start, and what that costs.

While slots move, the job goes on with what stays: servers and ranks that both plans have, and where
no server stays, one of today's until another one serves, if that can start beside it. If a step
takes T under the plan to come and t with what stays, ``D`` seconds of moving cost the job
``D (1 - T / t)`` seconds. Restarting the trainer stands for all of itself, and servers that start
meanwhile cost nothing more. To that comes what trajectories on the stopped servers must be
prefilled again.

As the GPU-seconds without work over the GPUs of a half, both halves added, which this was before,
moves were told 1.7 to 17 times too dear where a server is replaced: rollout that waits for its
longest trajectories has hardly another pace on fewer servers. Eight changes of plan on 24 GPUs
(mint, 80 steps, no drift) were told 106 to 108 s and lost 103 to 110, and were told 143 to 150 and
lost 160 to 179.

Guarantee: ``moves_between`` stops no server of a shape that both layouts have. Limit: all servers
start at once, and all workers; of servers that go, the last one is the last of the plan; on hosts
without GPUs the old process works on beside the new one, whose start takes its cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import TypeAlias

from libra_cli.core.costs.profile import MoveCost
from libra_cli.core.observation import Observation
from libra_cli.core.planning.rollout_table import PlannedBucket, planned_buckets
from libra_cli.core.planning.search import Layout, Search
from libra_cli.core.reconcile.reconciler import GRACE_S
from libra_cli.core.types import Bucket, Plan, Seconds, Slot, SlotId, devices_of
from libra_cli.core.workload import Workload

Device: TypeAlias = tuple[str, int | str]
"""A node, and a GPU of it, or what else only one process may have there."""


@dataclass(frozen=True, slots=True)
class Moves:
    """GPUs that change sides, further servers of frozen models, and servers of the policy by
    tensor-parallel degree that stop and start."""

    to_training: int
    to_rollout: int
    to_models: int
    stopped: dict[int, int]
    started: dict[int, int]

    @property
    def gpus(self) -> int:
        """GPUs that are idle during the moves, at most."""
        stopped = sum(degree * number for degree, number in self.stopped.items())
        started = sum(degree * number for degree, number in self.started.items())
        return max(stopped, started, self.to_training, self.to_rollout)

    @property
    def number(self) -> int:
        """Servers stopped and servers started, added up."""
        return sum(self.stopped.values()) + sum(self.started.values())


def moves_between(today: Layout, then: Layout) -> Moves:
    """The fewest: a server of a shape that both have stays."""
    before, after = today.servers, then.servers
    degrees, models = sorted({*before, *after}), dict(today.models)
    return Moves(
        to_training=max(0, then.training_gpus - today.training_gpus),
        to_rollout=max(0, then.rollout_gpus - today.rollout_gpus),
        to_models=sum(max(0, number - models.get(name, 0)) for name, number in then.models),
        stopped=_positive({d: before.get(d, 0) - after.get(d, 0) for d in degrees}),
        started=_positive({d: after.get(d, 0) - before.get(d, 0) for d in degrees}),
    )


@dataclass(frozen=True, slots=True)
class Staying:
    """What works on while slots move, and where what is new comes from.

    ``layout`` are servers that both plans have and ranks that train under both. Where no such
    server is, ``last`` is one of today's that serves until another one does, if that can start
    beside it; ``core_waits`` and ``workers_wait`` say whether its GPUs are to train. New servers,
    by tensor-parallel degree, are ``replacing`` others, or come from gradient workers or from the
    core; ``cut_from_core``: new gradient workers come from there too.
    """

    layout: Layout
    last: tuple[PlannedBucket, ...] = ()
    core_waits: bool = False
    workers_wait: bool = False
    replacing: frozenset[int] = frozenset()
    from_workers: frozenset[int] = frozenset()
    from_core: frozenset[int] = frozenset()
    cut_from_core: bool = False

    @property
    def serving(self) -> tuple[PlannedBucket, ...]:
        """The servers that take requests until those of the plan to come serve."""
        return self.layout.buckets or self.last


def what_stays(
    layout_of: Callable[[Plan, Sequence[Slot]], Layout],
    now: Observation,
    then: Plan,
    slots: Sequence[Slot],
) -> Staying:
    """Return what works on while slots move to another plan, which knows these ``slots``."""
    known = {slot.id: slot for slot in (*now.slots, *slots)}
    plan, then = now.working(now.plan), now.working(then)
    wanted = dict(then.servers)
    same = {
        slot: bucket
        for slot, bucket in plan.servers
        if slot in wanted and wanted[slot].has_shape_of(bucket)
    }
    workers = tuple(slot for slot in plan.gradient if slot in set(then.gradient))
    kept = replace(plan, servers=tuple(same.items()), gradient=workers)
    layout = layout_of(kept, now.slots)
    today = _Devices.of(plan, known)
    later = _Devices.of(then, known)
    ranks = max(1, len(today.core & later.core)) + sum(layout.workers)
    new = [(known.get(slot), bucket) for slot, bucket in then.servers if slot not in same]
    coming = [(_devices_of(slot), bucket.tensor_parallel) for slot, bucket in new]
    last = () if same else _last_server(plan, known, coming, today.core)
    own = _devices_of(known.get(last[0][0])) if last else set()
    cut = (known.get(slot) for slot in then.gradient if slot not in workers)
    return Staying(
        replace(layout, training_gpus=ranks),
        planned_buckets(replace(plan, servers=last)),
        core_waits=bool(own & later.core),
        workers_wait=bool(own & later.workers),
        replacing=frozenset(d for one, d in coming if not one & (today.core | today.workers)),
        from_workers=frozenset(d for one, d in coming if one & today.workers),
        from_core=frozenset(d for one, d in coming if one & today.core),
        cut_from_core=any(_devices_of(slot) & today.core for slot in cut),
    )


@dataclass(frozen=True, slots=True)
class _Devices:
    """The devices of a plan's base group and of its gradient workers."""

    core: set[Device]
    workers: set[Device]

    @classmethod
    def of(cls, plan: Plan, known: Mapping[SlotId, Slot]) -> _Devices:
        """Return those of a plan whose slots are ``known``."""
        core, workers = (
            {device for name in names for device in _devices_of(known.get(name))}
            for names in (plan.train, plan.gradient)
        )
        return cls(core, workers)


def _devices_of(slot: Slot | None) -> set[Device]:
    """Return the GPUs of a slot, by node; without GPUs what only it may have; nothing of none."""
    if slot is None:
        return set()
    return {(slot.node, gpu) for gpu in slot.gpus} or set(devices_of(slot))


def _last_server(
    plan: Plan,
    known: Mapping[SlotId, Slot],
    coming: Sequence[tuple[set[Device], int]],
    core: set[Device],
) -> tuple[tuple[SlotId, Bucket], ...]:
    """Return the server that serves until one of those ``coming`` does, as the reconciler has it:
    those whose devices another one needs go first. None where all that come need its own, or those
    of the trainer's ``core``."""
    needed = {device for devices, _ in coming for device in devices}
    free = [one for one in plan.servers if not _devices_of(known.get(one[0])) & needed]
    for last in (free or plan.servers)[-1:]:
        own = _devices_of(known.get(last[0]))
        if any(not devices & (own | core) for devices, _ in coming):
            return (last,)
    return ()


def change_cost_s(
    layout_of: Callable[[Plan, Sequence[Slot]], Layout],
    search: Search,
    now: Observation,
    then: Plan,
    slots: Sequence[Slot],
    *,
    restarts: bool,
) -> Seconds:
    """Seconds of the whole job that the moves of a run to another plan take, which knows these
    ``slots``; ``restarts``: the trainer's core, if it is another one."""
    restarts = restarts and then.train != now.plan.train
    return moves_cost_s(
        search,
        layout_of(now.working(now.plan), now.slots),
        layout_of(now.working(then), slots),
        what_stays(layout_of, now, then, slots),
        playing=now.workload,
        restart_s=search.profile.moves.resize_s if restarts else 0.0,
        step_end_s=now.step_end_s,
    )


def most_that_stays(today: Layout, then: Layout) -> Staying:
    """Return the most that can work on between two layouts of which no slot is known."""
    counts, kept = dict(then.servers), []
    for bucket in today.buckets:
        number = min(bucket.servers, counts.get(bucket.tensor_parallel, 0))
        counts[bucket.tensor_parallel] = counts.get(bucket.tensor_parallel, 0) - number
        kept += [replace(bucket, servers=number)] if number else []
    new = frozenset(degree for degree, number in counts.items() if number > 0)
    leaving = today.training_gpus - then.training_gpus
    started = sum(degree * counts[degree] for degree in new)
    last = min(today.buckets, key=lambda bucket: bucket.tensor_parallel, default=None)
    if kept or last is None or min(new, default=0) > today.rollout_gpus - last.tensor_parallel:
        last = None
    return Staying(
        replace(min(today, then, key=lambda one: one.training_gpus), buckets=tuple(kept)),
        (replace(last, servers=1),) if last else (),
        core_waits=leaving < 0,
        workers_wait=leaving < 0,
        replacing=new if started > leaving else frozenset(),
        from_workers=new if leaving > 0 else frozenset(),
    )


def moves_cost_s(
    search: Search,
    today: Layout,
    then: Layout,
    stays: Staying | None = None,
    *,
    playing: Workload | None = None,
    restart_s: Seconds = 0.0,
    step_end_s: Seconds = 0.0,
) -> Seconds:
    """Seconds of the whole job that the moves take; the formula is the module's.

    ``stays`` works on meanwhile; None: the most that can. ``playing`` is the work that is in
    flight, None: that of the search. ``restart_s`` is how long the trainer's core restarts, 0 if it
    does not; ``step_end_s`` are the seconds until training lets go of GPUs that are to serve.
    """
    stays = stays or most_that_stays(today, then)

    def step_s(layout: Layout) -> Seconds:
        return search.served_by(layout.models).times(layout).step_s

    ends = _ends(search.profile.moves, today, then, stays, restart_s, step_end_s)
    then_s, cost_s = step_s(then), 0.0
    for at, until in pairwise(ends.borders):
        share = 1.0
        if not ends.restart[0] <= at < ends.restart[1]:
            share = max(0.0, 1.0 - then_s / step_s(ends.layout_at(at, today, then, stays)))
        cost_s += (until - at) * share
    return cost_s + _prefill_again_s(search, playing or search.workload, today, then, stays)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Seconds from the beginning of moves until the last server serves, all ranks train, and
    further servers of frozen models serve; and from when to when the trainer's core restarts."""

    served_s: Seconds
    trained_s: Seconds
    modelled_s: Seconds
    restart: tuple[Seconds, Seconds]

    @property
    def borders(self) -> list[Seconds]:
        """Return when something changes, from 0 on."""
        return sorted({0.0, self.served_s, self.trained_s, self.modelled_s, *self.restart})

    def layout_at(self, at: Seconds, today: Layout, then: Layout, stays: Staying) -> Layout:
        """Return what works at a time at which the trainer does not restart."""
        ranks = then
        if at < max(self.trained_s, self.restart[0]):
            kept, core = stays.layout.workers, stays.layout.base_gpus
            if self.restart[1] > 0:
                core = (today if at < self.restart[0] else then).base_gpus
            ranks = replace(then, training_gpus=core + sum(kept), workers=kept)
        models = dict(today.models)
        fewer = tuple((name, min(number, models.get(name, 0))) for name, number in then.models)
        return replace(
            ranks,
            buckets=stays.serving if at < self.served_s else then.buckets,
            models=fewer if at < self.modelled_s else then.models,
        )


def _ends(
    prices: MoveCost,
    today: Layout,
    then: Layout,
    stays: Staying,
    restart_s: Seconds,
    step_end_s: Seconds,
) -> _Ends:
    replaced = [prices.start(degree) + GRACE_S for degree in stays.replacing]
    came = [step_end_s + prices.arrive(degree) for degree in stays.from_workers]
    left = [step_end_s + prices.arrive(degree) for degree in stays.from_core]
    core_waits = stays.core_waits and restart_s > 0
    # GPUs of the last server are free once another one serves; what comes from a core that waits
    # for them is none.
    first = replaced + came + ([] if core_waits else left)
    free_s = min(first, default=0.0) if stays.last else 0.0
    begins_s = free_s if core_waits else 0.0
    came += [begins_s + at for at in left]
    trained_s = begins_s + restart_s
    if _has_new_workers(then, stays.layout, restart_s):
        left_s = begins_s + step_end_s
        at_s = max(free_s * stays.workers_wait, left_s * stays.cut_from_core)
        trained_s = max(trained_s, at_s + prices.to_training_s)
    models = moves_between(today, then).to_models
    modelled_s = prices.start(1) + GRACE_S if models else 0.0
    restart = (begins_s, begins_s + restart_s)
    return _Ends(max(replaced + came, default=0.0), trained_s, modelled_s, restart)


def _has_new_workers(then: Layout, stays: Layout, restart_s: Seconds) -> bool:
    """Whether gradient workers come; ranks that do, where nothing restarts, are such."""
    grown = not restart_s and then.training_gpus > stays.training_gpus
    return grown or sum(then.workers) > sum(stays.workers)


def _positive(counts: dict[int, int]) -> dict[int, int]:
    return {degree: number for degree, number in counts.items() if number > 0}


def _prefill_again_s(
    search: Search, playing: Workload, today: Layout, then: Layout, stays: Staying
) -> Seconds:
    """Half-grown trajectories of the stopped servers, computed again on those of then."""
    stopped = today.rollout_gpus - stays.layout.rollout_gpus
    if stopped <= 0 or not then.buckets:
        return 0.0
    times = search.served_by(today.models).times(today)
    training = min(1.0, times.train_s / times.step_s) if times.step_s < inf else 1.0
    steps = playing.open(playing.in_flight(training))
    in_flight = steps * playing.trajectories * stopped / today.rollout_gpus
    tokens = in_flight * playing.mean_context / 2
    rate = 0.0
    for bucket in then.buckets:
        law = search.profile.servers.get(bucket.tensor_parallel)
        if law is not None:
            rate += bucket.servers / max(float(law.recompute_s(1, 0)), 1e-12)
    return tokens / rate if rate else inf
