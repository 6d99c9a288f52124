"""Every published table and figure that a simulator can show, one after the other.

Published are Libra (arXiv 2606.03077) and StreamRL (arXiv 2504.15930). What the simulator says of
each is told by the shipped prices and by those that are nearest to the published ratios.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from libra_cli.bench.config import Progress
from libra_cli.bench.paper.accuracy import accuracy_table
from libra_cli.bench.paper.cost_model import cost_model_table
from libra_cli.bench.paper.law import grid_table, growth_table
from libra_cli.bench.paper.payload import payload_table
from libra_cli.bench.paper.planning import planning_table, switch_table
from libra_cli.bench.paper.streaming import streaming_table
from libra_cli.bench.paper.systems import ablation_table, played, throughput_table
from libra_cli.bench.paper.tables import PaperScale, PaperTable

NOT_SHOWN = (
    ("reward over time, 2.5 and 2.73 times as fast", "nothing is learned in a simulator"),
    ("Qwen3-30B-A3B", "its shipped prices are derived from dense models, so they cannot differ"),
    ("KV moved within 330 ms and across nodes within 733 ms", "libra moves none: it recomputes"),
    ("32.8 % of a run in weights over disks", "libra sends weights between the hosts' memories"),
    ("1.23 to 1.33 times the work a dollar", "libra knows no sites and no prices in dollars"),
    ("a ranker's recall of 87 %", "libra has none; StreamRL's policy is given that recall"),
    ("2.66 times the throughput of verl", "verl's own code runs in no simulator; see colocated"),
    ("18 to 37 % over DynaRL", "on 160 NPUs, whose prices nobody has published"),
)
"""Published results that are not here, and why."""


def paper(scale: PaperScale, progress: Progress) -> Iterator[PaperTable]:
    """Yield every table as soon as what it needs has been simulated."""
    progress("growth and tokens by length")
    yield payload_table()
    yield growth_table()
    yield grid_table()
    yield accuracy_table(scale, _part(progress, "routing"))
    runs = played(scale, _part(progress, "systems"))
    yield throughput_table(runs)
    yield ablation_table(runs)
    yield streaming_table(scale, _part(progress, "StreamRL"))
    yield cost_model_table(scale, _part(progress, "cost model"))
    progress("planning")
    yield planning_table()
    yield switch_table(runs)


def _part(progress: Progress, name: str) -> Progress:
    return partial(_told, progress, name)


def _told(progress: Progress, name: str, text: str) -> None:
    progress(f"{name}: {text}")
