"""The profile whose constants are nearest to the published ratios of Libra (arXiv 2606.03077).

``python -m tests.research.as_published FOLDER`` fits it and writes it. Three constants are fitted,
on top of ``a800-qwen3-14b``:

    slowness    every second of a server, times the kernels' with the engine's overhead
    kv_share    of every server's KV cache
    tool_s      seconds that a trajectory of the published batch spends in tools

by least squares of logarithms over seven published numbers: four throughputs (8 servers of one GPU
and one of 8, at 0 to 2K and 16 to 32K tokens), the two ratios that follow, and the growth of
rollout from 1K to 32K. Steps that shrink by halves are tried along each constant until none helps.
The fixed seconds of a training step are then those with which training grows as published, and the
seconds of moves are the published ones.

``tool_s`` is no part of a profile; it is ``bench.paper.crossover.TOOL_S``. Limit: seven numbers and
three constants say what would explain the published figures, not what did.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from math import exp, inf, log
from pathlib import Path

from libra_cli.bench.paper.crossover import PUBLISHED, Crossover, crossover, fixed_step_s
from libra_cli.core.costs.profile import MoveCost, Profile
from libra_cli.core.types import Seconds
from libra_cli.sim.profiles import load_profile
from tests.research.changed_costs import with_kv_share

LIKE, NAME = "a800-qwen3-14b", "a800-qwen3-14b-as-published"
START = (2.0, 0.25, 100.0)
"""Slowness, share of the KV cache and seconds in tools that the search begins with."""
FINEST = 0.01
"""Least step of the search, in logarithms."""
SNAPSHOT_S, RESTORE_S, ACTIVATION_S = 3.6, 4.4, 10.8
"""Published seconds of a move to training (the first two, one after the other) and to rollout."""


def changed(slowness: float, kv_share: float) -> Profile:
    """The shipped profile with these constants, rounded to four digits; training is as shipped."""
    return with_kv_share(load_profile(LIKE).scaled(_rounded(slowness)), _rounded(kv_share))


def error(slowness: float, kv_share: float, tool_s: Seconds) -> float:
    """Sum of squared logarithms by which the seven numbers are off."""
    found = crossover(changed(slowness, kv_share), tool_s)
    if not found.long[1]:
        return inf  # a server of one GPU does not hold the longest trajectory
    pairs = zip(numbers(found), numbers(PUBLISHED), strict=True)
    return sum(log(ours / theirs) ** 2 for ours, theirs in pairs)


def numbers(found: Crossover) -> tuple[float, ...]:
    """The seven numbers of rollout, as they are compared with the published ones."""
    rates = (found.short[1], found.short[8], found.long[1], found.long[8])
    return (*rates, found.small_over_large, found.large_over_small, found.rollout_growth)


def fitted() -> tuple[float, float, Seconds]:
    """The constants with the least error, from ``START`` on."""
    at, step = [log(value) for value in START], 1.0
    least = error(*map(exp, at))
    while step >= FINEST:
        before = least
        for index in range(len(at)):
            for sign in (1, -1):
                tried = [*at]
                tried[index] += sign * step
                found = error(*map(exp, tried))
                if found < least:
                    at, least = tried, found
        if least == before:
            step /= 2
    slowness, kv_share, tool_s = map(exp, at)
    return _rounded(slowness), _rounded(kv_share), round(tool_s)


def profile_of(slowness: float, kv_share: float, tool_s: Seconds) -> Profile:
    """The profile with these constants, and where each comes from."""
    made = changed(slowness, kv_share)
    step_s = round(fixed_step_s(made, PUBLISHED.training_growth))
    training = replace(made.training, step_s=float(step_s))
    move_s = SNAPSHOT_S + RESTORE_S
    starts = dict.fromkeys(made.servers, ACTIVATION_S)
    moves = MoveCost(move_s, ACTIVATION_S, made.moves.resize_s, starts)
    shipped = made.provenance
    return replace(
        made,
        name=NAME,
        training=training,
        moves=moves,
        provenance={
            "facts": shipped["facts"],
            "kv_tokens": f"FITTED, NOT MEASURED: {kv_share:g} of those of {LIKE}.",
            "moves": "as published for Libra (arXiv 2606.03077): 3.6 s of a snapshot and 4.4 s of "
            "restored state to training, 10.8 s of an activated vLLM to rollout. resize_s, which "
            f"it does not have, is that of {LIKE}: an assumption.",
            "overhead_s": f"FITTED, NOT MEASURED: that of {LIKE} times {slowness:g}.",
            "servers": "FITTED TO PUBLISHED RATIOS, MEASURED NOWHERE, and chosen for no run that "
            f"does not name it. Every second is that of {LIKE} times {slowness:g}, and so is as "
            "near as three constants come (the third: a trajectory of the published batch spends "
            f"{tool_s:g} s in tools) to Libra's figures for 8 A800, Qwen3-14B and a batch of 512: "
            "1852 and 591 generated tokens/s of TP 1 and TP 8 at 0 to 2K tokens, 430 and 1220 at "
            "16K to 32K, and rollout 95 times as long at 32K as at 1K. Made by "
            "tests/research/as_published.py, checked by libra bench paper.",
            "training": f"as {LIKE}, but for step_s, FITTED TO A PUBLISHED RATIO: with {step_s} s "
            "whatever is in it, a step of 512 trajectories on 24 GPUs takes 3.9 times as long at "
            "32K tokens as at 1K.",
        },
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    made = profile_of(*fitted())
    Path(sys.argv[1], f"{made.name}.json").write_text(made.to_json(), encoding="utf-8")
