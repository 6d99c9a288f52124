"""From one layout to another: which servers stop and start, and what that costs.

While slots move, the job goes on with what stays: servers and ranks that both plans have, and where
no server stays, one of today's until another one serves, if that can start beside it. If a step
takes T under the plan to come and t with what stays, ``D`` seconds of moving cost the job
``D (1 - T / t)`` seconds. Restarting the trainer stands for all of itself, and servers that start
meanwhile cost nothing more. To that comes what trajectories on the stopped servers must be
prefilled again.

As the GPU-seconds without work over the GPUs of a half, both halves added, which this was before,
moves were told 2 to 17 times too dear where a server is replaced: rollout that waits for its
longest trajectories has hardly another pace on fewer servers. On 24 GPUs (mint) 16 s are told for
18 and 14 that were lost, and 106 s with a restart for 104 and 101.

Guarantee: ``moves_between`` stops no server of a shape that both layouts have. Limit: all servers
start at once, and all workers; GPUs that training gives up are taken to serve the policy; on hosts
without GPUs the old process works on beside the new one, whose start takes its cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from libra_cli.core.costs.profile import MoveCost
from libra_cli.core.observation import Observation
from libra_cli.core.planning.rollout_table import PlannedBucket, planned_buckets
from libra_cli.core.planning.search import Layout, Search
from libra_cli.core.reconcile.reconciler import GRACE_S
from libra_cli.core.types import Bucket, Plan, Seconds, Slot, SlotId, devices_of
from libra_cli.core.workload import Workload


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
    """What works on while slots move: servers that both plans have and ranks that train under both
    (``layout``); and, where no such server is, one of today's that serves until another one does,
    if that can start beside it (``last``)."""

    layout: Layout
    last: tuple[PlannedBucket, ...] = ()

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
    wanted, gradient = dict(then.servers), set(then.gradient)
    same = {
        slot: bucket
        for slot, bucket in now.plan.servers
        if slot in wanted and wanted[slot].has_shape_of(bucket)
    }
    workers = tuple(slot for slot in now.plan.gradient if slot in gradient)
    kept = replace(now.plan, servers=tuple(same.items()), gradient=workers)
    layout = layout_of(kept, now.slots)
    core = _devices(now.plan.train, known) & _devices(then.train, known)
    layout = replace(layout, training_gpus=max(1, len(core)) + sum(layout.workers))
    if same or not now.plan.servers:
        return Staying(layout)
    return Staying(
        layout, planned_buckets(replace(now.plan, servers=_last_server(now, then, known)))
    )


def _last_server(
    now: Observation, then: Plan, known: Mapping[SlotId, Slot]
) -> tuple[tuple[SlotId, Bucket], ...]:
    """Return the server that serves until another one does, by the rule of the reconciler: those
    whose devices another one needs go first. None where all that come need its own, or the
    trainer's."""
    coming = [_devices((slot,), known) for slot, _ in then.servers if slot not in now.plan.train]
    needed = set().union(*coming)
    free = [one for one in now.plan.servers if not _devices(one[:1], known) & needed]
    last = (free or now.plan.servers)[-1]
    own = _devices(last[:1], known)
    return (last,) if any(not own & each for each in coming) else ()


def _devices(names: Sequence[SlotId], known: Mapping[SlotId, Slot]) -> set[tuple[str, int | str]]:
    """Return the GPUs of these slots, by node; of one without GPUs what only it may have."""
    return {
        device
        for name in names
        if (slot := known.get(name)) is not None
        for device in ({(slot.node, gpu) for gpu in slot.gpus} or devices_of(slot))
    }


def most_that_stays(today: Layout, then: Layout) -> Staying:
    """Return the most that can work on between two layouts of which no slot is known."""
    counts, kept = dict(then.servers), []
    for bucket in today.buckets:
        number = min(bucket.servers, counts.get(bucket.tensor_parallel, 0))
        counts[bucket.tensor_parallel] = counts.get(bucket.tensor_parallel, 0) - number
        kept += [replace(bucket, servers=number)] if number else []
    fewer = min(today, then, key=lambda one: one.training_gpus)
    layout = replace(fewer, buckets=tuple(kept))
    if kept or not today.buckets:
        return Staying(layout)
    last = min(today.buckets, key=lambda bucket: bucket.tensor_parallel)
    least = min(then.servers, default=0)
    room = least <= today.rollout_gpus - last.tensor_parallel
    return Staying(layout, (replace(last, servers=1),) if room else ())


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
    ends = _ends(search.profile.moves, today, then, stays, restart_s, step_end_s)
    then_s, cost_s = search.times(then).step_s, 0.0
    for at, until in pairwise(ends.borders):
        share = 1.0
        if not ends.restart[0] <= at < ends.restart[1]:
            middle_s = search.times(ends.layout_at(at, today, then, stays)).step_s
            share = max(0.0, 1.0 - then_s / middle_s)
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
        if at < self.restart[0]:
            ranks = today
        elif at < self.trained_s:
            kept = stays.layout.workers
            core = _core(then) if self.restart[1] > 0 else _core(stays.layout)
            ranks = replace(then, training_gpus=core + sum(kept), workers=kept)
        models = dict(today.models)
        fewer = tuple((name, min(number, models.get(name, 0))) for name, number in then.models)
        return replace(
            ranks,
            buckets=stays.serving if at < self.served_s else then.buckets,
            models=fewer if at < self.modelled_s else then.models,
        )


def _core(layout: Layout) -> int:
    """Return the ranks of the base group."""
    return layout.training_gpus - sum(layout.workers)


def _ends(
    prices: MoveCost,
    today: Layout,
    then: Layout,
    stays: Staying,
    restart_s: Seconds,
    step_end_s: Seconds,
) -> _Ends:
    released_s = step_end_s + (restart_s if _core(stays.layout) < _core(today) else 0.0)
    served_s = _until_served(prices, today, then, stays.layout, released_s)
    # GPUs of the last server are free once another one serves.
    free_s = served_s if stays.last else 0.0
    begins_s = free_s if restart_s and _core(then) > _core(stays.layout) else 0.0
    trained_s = begins_s + restart_s
    if sum(then.workers) > sum(stays.layout.workers) or (
        not restart_s and then.training_gpus > stays.layout.training_gpus
    ):
        trained_s = max(trained_s, free_s + prices.to_training_s)
    models = moves_between(today, then).to_models
    modelled_s = prices.start(1) + GRACE_S if models else 0.0
    return _Ends(served_s, trained_s, modelled_s, (begins_s, begins_s + restart_s))


def _until_served(
    prices: MoveCost, today: Layout, then: Layout, stays: Layout, released_s: Seconds
) -> Seconds:
    """Seconds until the last server that is to start serves: on GPUs that served before, once their
    turns have ended; on those of training, ``released_s`` later."""
    kept = stays.servers
    new = {d: n - kept.get(d, 0) for d, n in then.servers.items() if n > kept.get(d, 0)}
    leaving = today.training_gpus - stays.training_gpus
    replaced = sum(degree * number for degree, number in new.items()) > leaving
    found = [prices.start(degree) + GRACE_S for degree in new if replaced]
    found += [released_s + prices.arrive(degree) for degree in new if leaving > 0]
    return max(found, default=0.0)


def _positive(counts: dict[int, int]) -> dict[int, int]:
    return {degree: number for degree, number in counts.items() if number > 0}


def _prefill_again_s(
    search: Search, playing: Workload, today: Layout, then: Layout, stays: Staying
) -> Seconds:
    """Half-grown trajectories of the stopped servers, computed again on those of then."""
    stopped = today.rollout_gpus - stays.layout.rollout_gpus
    if stopped <= 0 or not then.buckets:
        return 0.0
    in_flight = playing.trajectories * stopped / today.rollout_gpus
    tokens = in_flight * playing.mean_context / 2
    rate = 0.0
    for bucket in then.buckets:
        law = search.profile.servers.get(bucket.tensor_parallel)
        if law is not None:
            rate += bucket.servers / max(float(law.recompute_s(1, 0)), 1e-12)
    return tokens / rate
