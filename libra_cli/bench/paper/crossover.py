"""How much a batch's length favours large servers, and how rollout and training grow with it.

Published for Libra (arXiv 2606.03077) on 8 A800 with Qwen3-14B and a batch of 512: generated tokens
a second of 8 servers of one GPU and of one of 8, at 0 to 2K and at 16 to 32K tokens, and how much
longer rollout and training take at 32K than at 1K. Here they follow from a profile by the planner's
own law (``core.planning.rollout_table``), for a batch that is played alone.

Not published, and so assumed: lengths are spread evenly over their range, prompts have ``PROMPT``
tokens, and every trajectory spends ``TOOL_S`` in tools, whatever its length, and holds its seat
meanwhile. That is what lets 8 servers, with 8 times the seats of one, be three times as fast where
trajectories are short. ``TOOL_S`` was fitted along with the profile as published
(``tests/research/as_published.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.rollout_table import RolloutTable
from libra_cli.core.types import Seconds, Tokens
from libra_cli.core.workload import TrajectorySample, Workload

GPUS, BATCH, PROMPT = 8, 512, 512
TOOL_S: Seconds = 176.0
RANGES: tuple[tuple[Tokens, Tokens], ...] = (
    (0, 2048),
    (2048, 4096),
    (4096, 8192),
    (8192, 16384),
    (16384, 32768),
)
SHORT, LONG = RANGES[0], RANGES[-1]
GROWN: tuple[Tokens, Tokens] = (1024, 32768)
"""Lengths between which growth is told."""
TRAINING_GPUS = 24
"""GPUs that train where growth is told: half of the published 48. Assumed."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Generated tokens a second of 8 GPUs by tensor-parallel degree, and growth from 1K to 32K.

    ``short`` and ``long`` are by degree, at ``SHORT`` and ``LONG``; ``rollout_growth`` is of the
    servers that are fastest at each end.
    """

    short: Mapping[int, float]
    long: Mapping[int, float]
    rollout_growth: float
    training_growth: float

    @property
    def small_over_large(self) -> float:
        """How much faster 8 servers of one GPU are than one of 8, where trajectories are short."""
        return self.short[1] / self.short[8]

    @property
    def large_over_small(self) -> float:
        """How much faster one server of 8 GPUs is than 8 of one, where trajectories are long."""
        return self.long[8] / self.long[1]


PUBLISHED = Crossover({1: 1852.0, 8: 591.0}, {1: 430.0, 8: 1220.0}, 95.0, 3.9)


def crossover(profile: Profile, tool_s: Seconds = TOOL_S) -> Crossover:
    """What the profile says where Libra has published figures."""
    small, large = (min(batch_s(profile, (n, n), tool_s).values()) for n in GROWN)
    return Crossover(
        tokens_s(profile, SHORT, tool_s),
        tokens_s(profile, LONG, tool_s),
        large / small,
        training_growth(profile),
    )


def tokens_s(
    profile: Profile, lengths: tuple[Tokens, Tokens], tool_s: Seconds = TOOL_S
) -> dict[int, float]:
    """Generated tokens a second of all 8 GPUs, by the tensor-parallel degree of their servers."""
    tokens = _batch(lengths, tool_s).mean_generated * BATCH
    return {
        degree: tokens / seconds for degree, seconds in batch_s(profile, lengths, tool_s).items()
    }


def batch_s(
    profile: Profile, lengths: tuple[Tokens, Tokens], tool_s: Seconds = TOOL_S
) -> dict[int, Seconds]:
    """Seconds of the batch on 8 GPUs, by the degree of their servers."""
    workload = _batch(lengths, tool_s)
    # The batch is alone: nothing is held back so that contexts stay cached.
    table = RolloutTable(profile.servers, workload, GPUS, groups=1, play_share=1.0)
    return {degree: table.equal_s(degree, GPUS // degree) for degree in table.degrees}


def training_growth(profile: Profile) -> float:
    """How many times as long a training step takes at 32K tokens as at 1K."""
    small, large = (profile.training.seconds(TRAINING_GPUS, _batch((n, n), 0.0)) for n in GROWN)
    return large / small


def fixed_step_s(profile: Profile, growth: float) -> Seconds:
    """Seconds that a training step would have to take whatever is in it, to grow so much."""
    bare = replace(profile, training=replace(profile.training, step_s=0.0))
    small, large = (bare.training.seconds(TRAINING_GPUS, _batch((n, n), 0.0)) for n in GROWN)
    return (large - growth * small) / (growth - 1)


def _batch(lengths: tuple[Tokens, Tokens], tool_s: Seconds) -> Workload:
    least, most = lengths
    spread = (least + (most - least) * (index + 0.5) / 32 for index in range(32))
    samples = tuple(
        TrajectorySample(PROMPT, max(1, round(length)), tool_s=tool_s) for length in spread
    )
    return Workload(samples, BATCH, overlap=1.0)
