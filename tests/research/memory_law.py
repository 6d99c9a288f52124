"""The memory of a trainer's rank by the planner's law, beside what torch's tracker counts.

    python -m tests.research.memory_law

prints a JSON list: model, ranks, and the bytes of a rank at a step's worst moment, by both.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace

from libra_cli.config.training import TrainingSpec
from libra_cli.core.costs.memory import rank_memory
from tests.tracked_memory import LAYERS, MODELS, TOKENS, fake_world, tracked

WORLDS = (1, 8)
"""Ranks: alone under autocast, and sharded."""


def main() -> None:
    """Count every model on every number of ranks."""
    warnings.simplefilter("ignore")
    rows = [row(model, world) for model in MODELS for world in WORLDS]
    sys.stdout.write(json.dumps(rows, indent=1) + "\n")


def row(model: str, world: int) -> dict[str, str | int | float]:
    """Return the bytes of a rank by both."""
    shape = replace(MODELS[model], layers=LAYERS)
    with fake_world(world) as (mesh, _):
        counted = tracked(shape, world, "full", mesh, TrainingSpec())
    law = rank_memory(shape, world=world, tokens=TOKENS, choice="full")
    return {"model": model, "ranks": world, "law": law.total, "counted": counted.step}


if __name__ == "__main__":
    main()
