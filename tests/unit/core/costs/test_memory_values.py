"""The memory law's numbers, for a dense model and a mixture, as they were when the law was compared
with torch's memory tracker: whoever changes one compares again.

``python -m tests.unit.core.costs.test_memory_values`` writes ``rank_memory.tsv`` anew.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from libra_cli.config.training import LoraSpec
from libra_cli.core.costs.architecture import PUBLISHED, architecture_of
from libra_cli.core.costs.memory import GIB, rank_memory
from tests.package_graph import ROOT
from tests.unit.core.costs.test_mixture_transformer import QWEN3

VALUES = ROOT / "tests/fixtures/rank_memory.tsv"
MODELS = {"dense": PUBLISHED["Qwen3-0.6B"], "mixture": architecture_of(QWEN3, "m")}
AXES: dict[str, tuple[Any, ...]] = {
    "model": ("dense", "mixture"),
    "world": (1, 8),
    "tokens": (2048, 65_536),
    "choice": ("none", "selective", "full"),
    "width": (2, 4),
    "optimizer": ("adamw", "adamw_offload", "muon"),
    "lora": (0, 16),
    "reference": (False, True),
    "cp_size": (1, 8),
    "activation_offload": (False, True),
    "tiled_mlp": (False, True),
}
ROWS = 80


def cases() -> Iterator[dict[str, Any]]:
    """Those that can be: a mixture has no adapter."""
    for values in itertools.product(*AXES.values()):
        case = dict(zip(AXES, values, strict=True))
        if not (case["lora"] and case["model"] == "mixture"):
            yield case


def told(case: dict[str, Any]) -> str:
    """The moment at which a rank holds the most, and GiB by what they are for."""
    shape = MODELS[case["model"]]
    options = {name: case[name] for name in AXES if name not in ("model", "lora")}
    if case["lora"]:
        shape = shape.with_adapter(LoraSpec(rank=case["lora"]))
    use = rank_memory(shape, **options)
    parts = (f"{what} {size / GIB:.6g}" for what, size in use.parts.items())
    return f"{use.moment}: {', '.join(parts)}"


def rows() -> list[list[str]]:
    return [line.split("\t") for line in VALUES.read_text().splitlines()]


def test_the_rows_cover_every_value_and_every_moment() -> None:
    header, *cells = rows()
    columns = dict(zip(header, zip(*cells, strict=True), strict=True))
    for name, values in AXES.items():
        assert {*columns[name]} == {str(value) for value in values}
    moments = {(row[0], row[-1].split(":")[0]) for row in cells}
    both = {*itertools.product(MODELS, ("layer", "update"))}
    assert moments == {*both, ("dense", "head"), ("dense", "reduction")}


@pytest.mark.parametrize("row", rows()[1:], ids="-".join)
def test_a_rank_holds_what_it_held(row: list[str]) -> None:
    by_text = {name: {str(value): value for value in values} for name, values in AXES.items()}
    case = {name: by_text[name][text] for name, text in zip(AXES, row, strict=False)}
    assert told(case) == row[-1]


def main() -> None:
    """Draw cases, each moment of each model as often as can be, and write what they hold."""
    by_moment: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in cases():
        by_moment.setdefault((case["model"], told(case).split(":")[0]), []).append(case)
    drawn: list[dict[str, Any]] = []
    for kind in sorted(by_moment):
        found = by_moment[kind]
        drawn += random.Random(0).sample(found, min(ROWS // len(by_moment), len(found)))
    lines = [[*AXES, "held"]]
    lines += [[*map(str, case.values()), told(case)] for case in drawn]
    VALUES.write_text("".join("\t".join(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
