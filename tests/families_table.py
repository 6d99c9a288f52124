"""What ``python -m tests.research.families --write`` has measured, and its table in ``libra help
models``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from libra_cli.core.preflight.families import refused_family

MEASURED = Path(__file__).parent / "families.json"
PAGE = Path(__file__).parents[1] / "libra_cli/help/models.md"
WORST_GAP: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 5e-2}
"""Mean |difference| of log-probabilities in nats that a family may have, by what it is served in.
Tiny models in bfloat16 have 1e-2 to 2e-2."""
SMALL = 1e-6
"""Gaps below it are not told apart: they change with the order of sums."""
HEADER = "| family | class in `config.json` | gap in nats | trained, published, proved, exported |"


@dataclass(frozen=True, slots=True)
class Row:
    """What came out for a family."""

    family: str
    dtype: str = "float32"
    """What it was served in."""
    gap: float | None = None
    """Of the version after a step: vLLM's and the trainer's, nats a token."""
    exported: float | None = None
    """The gap of the exported directory: transformers' and vLLM's against the trainer's."""
    proved: bool = False
    """Whether both versions were proved, tensor by tensor."""
    stepped: str = ""
    """Matrices that a step changed, of those that are trained."""
    problem: str = ""
    """Why the family fails; empty if it does not."""

    @property
    def good(self) -> bool:
        """Whether it came through all of it."""
        gaps = (self.gap, self.exported)
        worst = WORST_GAP[self.dtype]
        small = all(gap is not None and gap <= worst for gap in gaps)
        return small and self.proved and not self.problem


def measured() -> dict[str, Row]:
    """Return the rows that are kept, by family."""
    return {row["family"]: Row(**row) for row in json.loads(MEASURED.read_text())["rows"]}


def keep(rows: Iterable[Row], order: Iterable[str], versions: Mapping[str, str]) -> None:
    """Put rows in place of those that are kept of the same families."""
    found = measured() | {row.family: row for row in rows}
    kept = [asdict(found[name]) for name in order if name in found]
    MEASURED.write_text(json.dumps({"versions": dict(versions), "rows": kept}, indent=1) + "\n")


def table(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table; ``configs`` has each family's config.json, in the table's order."""
    rows = measured()
    lines = [HEADER, "| --- | --- | --- | --- |"]
    for name, config in configs.items():
        refused = refused_family(config)
        if refused:
            gap, told = "", f"refused: {refused.why}"
        else:
            gap, told = _gap(rows[name]), _told(rows[name])
        lines.append(f"| {name} | `{config['architectures'][0]}` | {gap} | {told} |")
    return "\n".join(lines) + "\n"


def _told(row: Row) -> str:
    served = "" if row.dtype == "float32" else f", served in {row.dtype}"
    return f"yes{served}" if row.good else f"no: {row.problem or 'the gap is too large'}"


def _gap(row: Row) -> str:
    gap = max(row.gap or 0.0, row.exported or 0.0)
    return "below 1e-6" if gap < SMALL else f"{gap:.0e}"


def in_page() -> str:
    """Return the table as the page has it."""
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    first = lines.index(HEADER)
    count = next(i for i, line in enumerate(lines[first:]) if not line.startswith("|"))
    return "\n".join(lines[first : first + count]) + "\n"


def write_page(text: str) -> None:
    """Put this table in place of the page's."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(in_page(), text), encoding="utf-8")
