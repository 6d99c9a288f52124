"""From one layout to another: which servers stop and start, and what that costs.

While slots move, the job goes on with what stays: servers and ranks that both plans have, and one
of today's servers until another one serves. If a step takes T under the plan to come and t with
what stays, ``D`` seconds of moving cost the job ``D (1 - T / t)`` seconds. Restarting the trainer
stands for all of itself, and servers that start meanwhile cost nothing more. To that comes what
trajectories on the stopped servers must be prefilled again.

As the GPU-seconds without work over the GPUs of a half, both halves added, which this was before,
moves were told 2 to 17 times too dear where a server is replaced: rollout that waits for its
longest trajectories has hardly another pace on fewer servers. On 24 GPUs (mint) 16 s are told for
18 and 14 that were lost, and 106 s with a restart for 104 and 101.

Guarantee: ``moves_between`` stops no server of a shape that both layouts have. Limit: it takes all
servers to start at once and all workers to come at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from libra_cli.core.costs.profile import Profile
from libra_cli.core.observation import Observation
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout, Search
from libra_cli.core.reconcile.reconciler import GRACE_S
from libra_cli.core.types import Plan, Seconds, Slot, devices_of
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


def layout_that_stays(
    layout_of: Callable[[Plan, Sequence[Slot]], Layout],
    now: Observation,
    then: Plan,
    slots: Sequence[Slot],
) -> Layout:
    """Return what works on while slots move to another plan, which knows these ``slots``: servers
    that both plans have, and devices that train under both."""
    serving, gradient = dict(then.servers), set(then.gradient)
    same = (
        (slot, bucket)
        for slot, bucket in now.plan.servers
        if slot in serving and serving[slot].has_shape_of(bucket)
    )
    kept = tuple(slot for slot in now.plan.gradient if slot in gradient)
    stays = layout_of(replace(now.plan, servers=tuple(same), gradient=kept), now.slots)
    both = _training_devices(now.plan, now.slots) & _training_devices(then, slots)
    return replace(stays, training_gpus=max(1, len(both)))


def _training_devices(plan: Plan, slots: Sequence[Slot]) -> set[tuple[str, int | str]]:
    """Return the GPUs that train, by node; of a slot without GPUs what only it may have."""
    trains = {*plan.train, *plan.gradient}
    return {
        device
        for slot in slots
        if slot.id in trains
        for device in ({(slot.node, gpu) for gpu in slot.gpus} or devices_of(slot))
    }


def most_that_stays(today: Layout, then: Layout) -> Layout:
    """Return the most that can work on between two layouts of which no slot is known."""
    counts, kept = dict(then.servers), []
    for bucket in today.buckets:
        number = min(bucket.servers, counts.get(bucket.tensor_parallel, 0))
        counts[bucket.tensor_parallel] = counts.get(bucket.tensor_parallel, 0) - number
        kept += [replace(bucket, servers=number)] if number else []
    fewer = min(today, then, key=lambda one: one.training_gpus)
    return replace(fewer, buckets=tuple(kept))


def moves_cost_s(
    search: Search,
    today: Layout,
    then: Layout,
    stays: Layout | None = None,
    *,
    restart_s: Seconds = 0.0,
    step_end_s: Seconds = 0.0,
) -> Seconds:
    """Seconds of the whole job that the moves take; the formula is the module's.

    ``stays`` works on meanwhile; None: the most that can. ``restart_s`` is how long the trainer's
    core restarts, 0 if it does not; GPUs join training as gradient workers otherwise.
    ``step_end_s`` are the seconds until training lets go of GPUs that are to serve.
    """
    stays = stays or most_that_stays(today, then)
    moves, prices = moves_between(today, then), search.profile.moves
    served_s = _until_served(search.profile, then, stays, today, restart_s + step_end_s)
    arrive, leave = (one.training_gpus > stays.training_gpus for one in (then, today))
    # GPUs of the last server train once another one serves.
    free_s = 0.0 if stays.buckets else served_s
    restart = (free_s, free_s + restart_s) if arrive else (0.0, restart_s)
    trained_s = max(free_s + prices.to_training_s if arrive else 0.0, served_s if leave else 0.0)
    serving = stays.buckets or _largest(today.buckets)
    then_s, cost_s = search.times(then).step_s, 0.0
    for at, until in pairwise(sorted({0.0, *restart, served_s, trained_s})):
        share = 1.0
        if not restart[0] <= at < restart[1]:
            ranks = stays if at < trained_s else then
            middle = replace(ranks, buckets=serving if at < served_s else then.buckets)
            share = max(0.0, 1.0 - then_s / search.times(middle).step_s)
        cost_s += (until - at) * share
    cost_s += moves.to_models * (prices.start(1) + GRACE_S) / max(1, today.rollout_gpus)
    return cost_s + _prefill_again_s(search.profile, search.workload, today, then, moves)


def _until_served(
    profile: Profile, then: Layout, stays: Layout, today: Layout, released_s: Seconds
) -> Seconds:
    """Seconds until the last server that is to start serves: on GPUs that served before, once their
    turns have ended; on those of training, ``released_s`` later."""
    kept = stays.servers
    new = {d: n - kept.get(d, 0) for d, n in then.servers.items() if n > kept.get(d, 0)}
    leaving = today.training_gpus - stays.training_gpus
    replaced = sum(degree * number for degree, number in new.items()) > leaving
    prices = profile.moves
    found = [prices.start(degree) + GRACE_S for degree in new if replaced]
    found += [released_s + prices.arrive(degree) for degree in new if leaving]
    return max(found, default=0.0)


def _largest(buckets: tuple[PlannedBucket, ...]) -> tuple[PlannedBucket, ...]:
    """Return one server of the largest shape; none of none."""
    best = max(buckets, key=lambda bucket: bucket.tensor_parallel, default=None)
    return (replace(best, servers=1),) if best else ()


def _positive(counts: dict[int, int]) -> dict[int, int]:
    return {degree: number for degree, number in counts.items() if number > 0}


def _prefill_again_s(
    profile: Profile, workload: Workload, today: Layout, then: Layout, moves: Moves
) -> Seconds:
    """Half-grown trajectories of the stopped servers, computed again on those of then."""
    stopped = sum(degree * number for degree, number in moves.stopped.items())
    if not stopped or not then.buckets:
        return 0.0
    in_flight = workload.trajectories * stopped / max(1, today.rollout_gpus)
    tokens = in_flight * workload.mean_context / 2
    rate = 0.0
    for bucket in then.buckets:
        law = profile.servers.get(bucket.tensor_parallel)
        if law is not None:
            rate += bucket.servers / max(float(law.recompute_s(1, 0)), 1e-12)
    return tokens / rate
