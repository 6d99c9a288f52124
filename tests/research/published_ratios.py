"""With which constants the cost model says what was published, and how far the shipped ones are.

    python -m tests.research.published_ratios [--profile NAME] [--json FILE]

Published for Libra (arXiv 2606.03077) on 8 A800, with Qwen3-14B and 512 trajectories a batch: at 0
to 2K generated tokens 8 servers of one GPU give 3.1 times the tokens a second of one server of 8,
at 16 to 32K one of 8 gives 2.8 times those of 8; from 1K to 32K tokens rollout time grows 95 times
and training time 3.9 times.

The sweep puts an engine's overhead on kernel times, per step and per sequence, and bounds what a
server holds, by ``max_num_seqs`` and by a share of its KV cache. A batch is played alone, with an
``overlap`` of 1; lengths are spread evenly over their range, prompts have ``PROMPT`` tokens, and no
tool is called. Nothing is held back to keep contexts cached: caches are filled whole.
It is a check of the law and not a fit: the shipped constants are not taken from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import log

import typer

from libra_cli.bench.report.sheets import Report
from libra_cli.bench.report.terminal import Sheet, amount
from libra_cli.cli.reports import Json, ProfileName, show_report, working
from libra_cli.cli.terminal import errors_told
from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.rollout_table import DEFAULT_SEATS, PlannedBucket, RolloutTable
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile
from tests.research.changed_costs import with_kv_share, with_overhead

GPUS, BATCH, PROMPT = 8, 512, 512
SHORT, LONG = (0, 2048), (16384, 32768)
SHORT_RATIO, LONG_RATIO, ROLLOUT_GROWTH, TRAINING_GROWTH = 3.1, 2.8, 95.0, 3.9
STEPS_S = (0.0, 0.002, 0.004, 0.008, 0.012, 0.02, 0.04)
SEQUENCES_S = (0.0, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3)
SEATS = (16, 32, 64, 128, 256)
KV_SHARES = (1.0, 0.5, 0.33, 0.25, 0.2, 0.15)
NEAREST = 8
"""Rows of the sweep that are shown."""


@dataclass(frozen=True, slots=True)
class Constants:
    """On top of kernel times: seconds a step and a sequence; what bounds a server."""

    step_s: float
    sequence_s: float
    max_num_seqs: int
    kv_share: float

    def of(self, profile: Profile) -> Profile:
        """The profile with these instead of its own."""
        bare = with_kv_share(with_overhead(profile, self.step_s), self.kv_share)
        servers = {
            degree: replace(cost.linear(), sequence_s=cost.sequence_s + self.sequence_s)
            for degree, cost in bare.servers.items()
        }
        return replace(bare, servers=servers)


@dataclass(frozen=True, slots=True)
class PublicationRow:
    """What these constants come to. ``short_ratio`` is TP 1 over TP 8, ``long_ratio`` the reverse.

    ``growth`` is of rollout time from 1K to 32K on the servers that are fastest at each;
    ``tokens_s`` are TP 1 and TP 8 at short, then at long lengths.
    """

    constants: Constants
    short_ratio: float
    long_ratio: float
    growth: float
    tokens_s: tuple[float, float, float, float]

    @property
    def error(self) -> float:
        """Mean factor by which the three ratios are off, less one."""
        pairs = (
            (self.short_ratio, SHORT_RATIO),
            (self.long_ratio, LONG_RATIO),
            (self.growth, ROLLOUT_GROWTH),
        )
        return sum(abs(log(ours / theirs)) for ours, theirs in pairs) / len(pairs)


@dataclass(frozen=True, slots=True)
class PublicationResult:
    """The profile as it is shipped, and the sweep, the nearest to the published ratios first.

    ``training_growth`` is of training time from 1K to 32K; ``needed_step_s`` the seconds a step
    would have to take, whatever is in it, for that to be as published.
    """

    profile: str
    shipped: PublicationRow
    rows: list[PublicationRow]
    training_growth: float
    needed_step_s: float


def published_ratios(profile: Profile) -> PublicationResult:
    """With which constants the cost model says what was published, and what it says as shipped."""
    shipped, rows = shipped_row(profile), publication_table(profile)
    return PublicationResult(profile.name, shipped, rows, *training_growth(profile))


def publication_table(profile: Profile) -> list[PublicationRow]:
    """Every combination of the sweep, the nearest to the published ratios first."""
    grid = product(STEPS_S, SEQUENCES_S, SEATS, KV_SHARES)
    rows = (publication_row(profile, Constants(*constants)) for constants in grid)
    return sorted(rows, key=lambda row: row.error)


def shipped_row(profile: Profile, max_num_seqs: int = DEFAULT_SEATS) -> PublicationRow:
    """What the profile says as it is shipped."""
    return publication_row(profile, Constants(profile.overhead_s, 0.0, max_num_seqs, 1.0))


def publication_row(profile: Profile, constants: Constants) -> PublicationRow:
    """The three rollout ratios with these constants."""
    changed = constants.of(profile)
    seats = constants.max_num_seqs
    short = _throughputs(changed, _spread(*SHORT), seats)
    long = _throughputs(changed, _spread(*LONG), seats)
    small, large = (min(_seconds(changed, _spread(n, n), seats)) for n in (1024, 32768))
    return PublicationRow(
        constants=constants,
        short_ratio=short[0] / short[1],
        long_ratio=long[1] / max(long[0], 1e-9),
        growth=large / small,
        tokens_s=(*short, *long),
    )


def training_growth(profile: Profile, gpus: int = 24) -> tuple[float, float]:
    """Of training time from 1K to 32K: with the profile, and the fixed seconds that make it 3.9."""
    bare = replace(profile.training, step_s=0.0)
    small, large = (bare.seconds(gpus, _spread(n, n)) for n in (1024, 32768))
    fixed = profile.training.step_s
    needed = (large - TRAINING_GROWTH * small) / (TRAINING_GROWTH - 1)
    return (large + fixed) / (small + fixed), needed


def _spread(least: int, most: int) -> Workload:
    lengths = (least + (most - least) * (index + 0.5) / 32 for index in range(32))
    samples = tuple(TrajectorySample(PROMPT, max(1, round(length))) for length in lengths)
    return Workload(samples, BATCH, overlap=1.0)


def _seconds(profile: Profile, workload: Workload, seats: int) -> tuple[float, float]:
    """Of a batch on 8 servers of one GPU, and on one of 8."""
    table = RolloutTable(
        profile.servers, workload, GPUS, max_num_seqs=seats, groups=1, play_share=1.0
    )
    one, eight = (
        table.buckets_s((PlannedBucket(degree, GPUS // degree, 0, seats),)) for degree in (1, 8)
    )
    return one, eight


def _throughputs(profile: Profile, workload: Workload, seats: int) -> tuple[float, float]:
    tokens = workload.mean_generated * workload.trajectories
    one, eight = _seconds(profile, workload, seats)
    return tokens / one, tokens / eight


def publication_report(found: PublicationResult) -> Report:
    """The published ratios beside those of the shipped constants and of the nearest ones."""
    ratios = (SHORT_RATIO, LONG_RATIO, ROLLOUT_GROWTH)
    nearest, published = found.rows[:NEAREST], TRAINING_GROWTH
    table = [
        ("published", "", "", "", "", *_ratios(*ratios)),
        _publication_row("as shipped", found.shipped),
        *(_publication_row("" if at else "nearest", row) for at, row in enumerate(nearest)),
    ]
    notes = [
        "short: tokens/s of 8 servers of one GPU over one of 8, at 0 to 2K tokens",
        "long: the reverse, at 16K to 32K; growth: rollout time from 1K to 32K",
        "8 GPUs, a batch of 512 trajectories",
        f"training grows {found.training_growth:.1f} times from 1K to 32K, published {published}",
        f"that would take {amount(found.needed_step_s)} s a step, whatever is in it",
    ]
    columns = ("", "step\nms", "sequence\nus", "seats", "KV\nshare", "short", "long", "growth")
    sheet = Sheet(f"the published ratios, {found.profile}", columns, table, notes)
    body = {
        "published": dict(zip(("short", "long", "growth"), ratios, strict=True)),
        "shipped": asdict(found.shipped),
        "nearest": [asdict(row) for row in nearest],
        "training_growth": found.training_growth,
    }
    return Report((sheet,), body)


def _publication_row(title: str, row: PublicationRow) -> Sequence[str]:
    given = row.constants
    constants = (
        f"{given.step_s * 1e3:g}",
        f"{given.sequence_s * 1e6:g}",
        str(given.max_num_seqs),
        f"{given.kv_share:g}",
    )
    return title, *constants, *_ratios(row.short_ratio, row.long_ratio, row.growth)


def _ratios(short: float, long: float, growth: float) -> Iterable[str]:
    return f"{short:.2f}", f"{long:.2f}", f"{growth:.0f}"


def main(profile: ProfileName = "a800-qwen3-14b", json_file: Json = None) -> None:
    """With which constants the cost model says what was published."""
    with errors_told():
        with working():
            found = published_ratios(load_profile(profile))
        show_report(publication_report(found), json_file)


if __name__ == "__main__":
    typer.run(main)
