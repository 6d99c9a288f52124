"""The conditions that contenders are compared under, as they were asked for and not yet read."""

from __future__ import annotations

from dataclasses import dataclass

from libra_cli.core.types import Tokens

PROFILE = "a800-qwen3-14b"
GPUS, SEEDS, POLICY, DRIFT = 48, 3, "libra", "1,4"
STALENESS = 1
"""The default of ``training.max_staleness``, as in a recipe."""
NETWORK = 200.0
"""Gigabits a second of a host, as in the evaluation of Libra (arXiv 2606.03077)."""
MAX_LEN = 131_072
"""Tokens at which trajectories are cut, as a run would, or
where its trainer's memory ends earlier.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of an experiment as typed: contenders, traces and settings.

    Lists are separated by commas, drifts by spaces; an empty one means all there are, and no drift.
    ``traces`` are files or the beginnings of shipped names; none is the default trace. ``bound`` is
    training.max_staleness, ``rule`` a name of ``config.RULES`` (empty: the recipe's default),
    ``stream`` training.stream, ``shapes`` rollout.shapes, ``network`` in gigabits a second,
    ``seeds`` a number of workloads.
    """

    traces: tuple[str, ...] = ()
    gpus: int = GPUS
    profile: str = PROFILE
    policies: str = ""
    planners: str = ""
    policy: str = POLICY
    drift: str = DRIFT
    bound: int = STALENESS
    rule: str = ""
    network: float = NETWORK
    stream: bool = False
    max_len: Tokens = MAX_LEN
    shapes: str = "alike"
    seeds: int = SEEDS
