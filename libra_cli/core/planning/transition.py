"""From one layout to another: which servers stop and start, and what that costs.

A move costs a half of the job as many seconds as that half would need to make up for what its GPUs
do not do meanwhile: GPU-seconds without work over the GPUs of the half. For rollout those are
servers of another shape, or of a frozen model, on GPUs that served before: turns under way have
``GRACE_S`` to end, then the next server starts. For training they are GPUs that leave it before
their server serves, and GPUs that come before their worker works. To that comes what trajectories
on the stopped servers must be prefilled again.

Against 24 GPUs in the simulator that were made to move in the middle of a steady run (tau2, one
seed, five moves): 42, 42, 4, 55 and 71 s were lost, and 45, 9, 6, 49 and 34 s are predicted. As a
share of all GPUs, which this was before, it was 20, 5, 5, 21 and 18 s.

Guarantee: ``moves_between`` stops no server of a shape that both layouts have. Limit: it counts
GPUs and servers, and adds the losses of both halves, of which one may have slack; the placement
says which slot a server is on, and how many change sides with others (``swaps_cost_s``).
"""

from __future__ import annotations

from dataclasses import dataclass

from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.search import Layout
from libra_cli.core.reconcile.reconciler import GRACE_S
from libra_cli.core.types import Seconds
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


def moves_cost_s(profile: Profile, workload: Workload, today: Layout, then: Layout) -> Seconds:
    """Seconds of the whole job that the moves take; the formula is the module's.

    GPUs join training as gradient workers, so its core does not restart.
    """
    moves, prices = moves_between(today, then), profile.moves
    started = sum(degree * number for degree, number in moves.started.items())
    arrived = min(1.0, moves.to_rollout / max(1, started))
    starting, arriving = (
        sum(seconds(degree) * degree * number for degree, number in moves.started.items())
        for seconds in (prices.start, prices.arrive)
    )
    replaced = (1 - arrived) * (starting + GRACE_S * started)
    cost = replaced / max(1, today.rollout_gpus)
    cost += arrived * arriving / max(1, today.training_gpus)
    cost += moves.to_training * prices.to_training_s / max(1, then.training_gpus)
    cost += moves.to_models * (prices.start(1) + GRACE_S) / max(1, today.rollout_gpus)
    return cost + _prefill_again_s(profile, workload, today, then, moves)


def swaps_cost_s(
    profile: Profile, today: Layout, *, leave: int, arrive: int, wait_s: Seconds
) -> Seconds:
    """Seconds of the whole job that moves cost of which a layout does not tell, since as many GPUs
    go the other way.

    ``leave`` GPUs of training are to serve and replace servers that rollout gives up; it is without
    them for the ``wait_s`` seconds until training releases them, and until their servers serve.
    ``arrive`` GPUs are to train and replace others that leave, and training is without them until
    their workers work.
    """
    prices = profile.moves
    rollout_s = leave * (wait_s + prices.arrive(1)) / max(1, today.rollout_gpus)
    return rollout_s + arrive * prices.to_training_s / max(1, today.training_gpus)


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
