"""The tables that follow from the prices alone: growth, the crossover, and tokens by length."""

from __future__ import annotations

from functools import partial

from libra_cli.bench.paper.crossover import (
    PUBLISHED,
    RANGES,
    TOOL_S,
    crossover,
    tokens_s,
)
from libra_cli.bench.paper.tables import Figure, PaperRow, PaperTable, Told, both
from libra_cli.core.costs.profile import Profile
from libra_cli.core.types import Seconds, Tokens

DEGREES = (1, 2, 4, 8)


def growth_table() -> PaperTable:
    """How rollout and training grow with length, and which servers are faster at each end."""
    rows = (
        ("rollout, 32K over 1K", "rollout_growth"),
        ("training, 32K over 1K", "training_growth"),
        ("0-2K: 8 x TP 1 over TP 8", "small_over_large"),
        ("16-32K: TP 8 over 8 x TP 1", "large_over_small"),
    )
    told = [
        PaperRow(what, _times(getattr(PUBLISHED, name)), *both(partial(_of, name, TOOL_S)))
        for what, name in rows
    ]
    told += [
        PaperRow(f"  no tools: {what}", None, *both(partial(_of, name, 0.0)))
        for what, name in (rows[0], rows[2], rows[3])
    ]
    return PaperTable(
        "growth and crossover",
        tuple(told),
        why=(
            "shipped prices are of kernels, 2.3 times as fast, and of 4.5 times the KV cache",
            "by either prices small servers win at short lengths only where tools take long",
        ),
        notes=(
            "8 A800, Qwen3-14B, a batch of 512 alone",
            f"a trajectory spends {TOOL_S:.0f} s in tools, fitted, published nowhere",
        ),
    )


def grid_table() -> PaperTable:
    """Tokens a second of 8 GPUs by tensor-parallel degree and length."""
    rows = []
    for least, most in RANGES:
        for degree in DEGREES:
            what = f"{least // 1024}K to {most // 1024}K, {8 // degree} x TP {degree}"
            own = both(partial(_rate, (least, most), degree))
            rows.append(PaperRow(what, _published(least, degree), *own))
    return PaperTable("tokens a second of 8 GPUs", tuple(rows), why=("as above",))


def _rate(lengths: tuple[Tokens, Tokens], degree: int, prices: Profile) -> Figure:
    return Figure(tokens_s(prices, lengths)[degree], "tok/s")


def _of(name: str, tool_s: Seconds, prices: Profile) -> Figure:
    return _times(getattr(crossover(prices, tool_s), name))


def _times(value: float) -> Figure:
    return Figure(value, "times")


def _published(least: int, degree: int) -> Told:
    known = PUBLISHED.short if least == RANGES[0][0] else PUBLISHED.long
    ends = (RANGES[0][0], RANGES[-1][0])
    return Figure(known[degree], "tok/s") if least in ends and degree in known else None
