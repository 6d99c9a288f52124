"""The scene of a simulated run whose servers, steps and moves cost what a profile says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from libra_cli.core import actions as a
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.profile import Profile
from libra_cli.core.types import Bucket, Seconds, Tokens
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.config import SimConfig


def priced_scene(
    profile: Profile,
    *,
    guess_of: Callable[[Bucket], ServerLaw],
    switch_s: Seconds = 0.0,
    decay: float = 0.0,
) -> partial[SimConfig]:
    """What makes the scene of a ``recipe``, its first ``plan`` and the ``slots`` of it.

    ``guess_of`` is what the scheduler believes of servers; ``switch_s`` are seconds before each
    step in which all GPUs change over to training; ``decay`` is that of a token's worth, in nats a
    version.
    """
    moves, around = profile.moves, profile.surroundings
    beside = profile.scaled(around.serving_slowdown)
    return partial(
        SimConfig,
        cost_of=partial(server_law, profile),
        guess_of=guess_of,
        train_s=partial(_train_s, profile, switch_s),
        start_s=lambda bucket: moves.start(bucket.tensor_parallel),
        to_training_s=moves.to_training_s,
        resize_s=moves.resize_s,
        sync_s=around.sync_s,
        stall_s=around.stall_s,
        turn_s=around.turn_s,
        gradient_s=profile.training.transfer_s,
        fixed_s=profile.training.step_s,
        shared=profile.training.shared,
        decay=decay,
        beside_of=partial(server_law, beside) if around.serving_slowdown > 1 else None,
        training_slowdown=around.training_slowdown,
        cache_of=partial(_cache_of, profile),
        rank_slowdown=around.rank_slowdown,
    )


def server_law(profile: Profile, bucket: Bucket) -> ServerLaw:
    """The prices of a bucket's servers. Raises KeyError where the profile has none."""
    return profile.servers[bucket.tensor_parallel]


def _cache_of(profile: Profile, bucket: Bucket, memory: float) -> Tokens:
    """Return the tokens of the KV cache of a server with a share of its GPUs' memory; 0: none."""
    cost = profile.sharing(bucket.tensor_parallel, memory)
    return 0 if cost is None else cost.kv_tokens


def _train_s(
    profile: Profile, switch_s: Seconds, samples: tuple[a.TrainSample, ...], gpus: int
) -> Seconds:
    """Return the seconds of a step on ``gpus`` GPUs, with ``switch_s`` before it."""
    batch = tuple(_sample(sample) for sample in samples)
    return switch_s + profile.training.seconds(max(1, gpus), Workload(batch, len(batch)))


def _sample(sample: a.TrainSample) -> TrajectorySample:
    trajectory = sample.trajectory
    other = len(trajectory.token_ids) - trajectory.generated
    return TrajectorySample(prompt=other, generated=max(1, trajectory.generated))
