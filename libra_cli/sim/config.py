"""The scene of a simulated run: a recipe's numbers, a plan, and what everything costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.types import Bucket, Plan, Seconds, Slot, Tokens


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The scene of a simulated run: a recipe's numbers, a plan, and what everything costs.

    ``cost_of`` is what the servers really cost, ``guess_of`` what the scheduler believes.
    ``train_s`` prices one optimizer step on so many GPUs; ``sync_s`` is the time from a version's
    publication to a server that has proved it, ``stall_s`` how long its engine stands still
    meanwhile; ``start_s`` the time to start a server of a shape after the first plan, ``wake_s``
    until one that sleeps can load again, ``model_start_s`` to start one of a frozen model, of
    which a trajectory asks so many seconds of a server as ``asks`` tells,
    ``to_training_s`` to start a gradient worker,
    ``resize_s`` to restart the trainer with other slots; ``gradient_s`` how long a worker's
    gradients of a step travel, ``fixed_s`` what of an optimizer step only the base group has,
    and ``shared`` the share of the others that is its first update's, which workers take part in;
    ``turn_s`` what a turn spends outside engine and tool.
    Where servers share cores with the trainer, ``beside_of`` is what they cost while it works, and
    its step takes ``training_slowdown`` times as long while any of them does, and longer by the
    share ``rank_slowdown`` for each rank beyond the first. ``cache_of`` says how many tokens the KV
    cache of a bucket's server has that has a share of its GPUs' memory. ``decay`` is by how many
    nats the logarithm of a token's worth falls a version.
    """

    recipe: Recipe
    plan: Plan
    slots: tuple[Slot, ...]
    cost_of: Callable[[Bucket], ServerLaw]
    guess_of: Callable[[Bucket], ServerLaw]
    train_s: Callable[[tuple[a.TrainSample, ...], int], Seconds]
    start_s: Callable[[Bucket], Seconds]
    sync_s: Seconds = 1.0
    wake_s: Seconds = 1.0
    model_start_s: Seconds = 60.0
    asks: Mapping[str, Seconds] = field(default_factory=dict)
    to_training_s: Seconds = 8.0
    resize_s: Seconds = 60.0
    stall_s: Seconds = 0.0
    turn_s: Seconds = 0.0
    gradient_s: Seconds = 0.0
    fixed_s: Seconds = 0.0
    shared: float = 1.0
    beside_of: Callable[[Bucket], ServerLaw] | None = None
    training_slowdown: float = 1.0
    cache_of: Callable[[Bucket, float], Tokens] | None = None
    decay: float = 0.0
    rank_slowdown: float = 0.0
