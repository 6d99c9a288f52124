"""The recipes that the gallery runs, and how the model that each makes is examined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]
RECIPES = CHECKOUT / "recipes"
HELD_OUT: Mapping[str, Any] = {"num_tasks": 64, "samples": 4}
"""The evaluation of a recipe that has none of its own."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A recipe of ``recipes/`` that runs on a CPU."""

    name: str
    """The recipe's file name without ``.yaml``."""
    shows: str
    """The heading of its section."""
    examined_by: str = ""
    """The recipe whose evaluation its model is examined with; empty: its own, or ``HELD_OUT``."""
    exports_to: str = ""
    """Where another recipe looks for its model; empty: nowhere."""
    needs: str = ""
    """The entry whose model it begins with."""
    curve: str = "reward/mean"
    """The metric of a step that is drawn."""
    further_seeds: tuple[int, ...] = ()
    """Seeds that it is run with beside the recipe's own, to draw their curves too."""
    kills_a_server: bool = False
    """Whether a vLLM server is killed in the middle; what every slot did is then drawn too."""

    @property
    def recipe(self) -> Path:
        return RECIPES / f"{self.name}.yaml"


ENTRIES: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("quickstart", "follow keys through a store with a tool that fails"),
        Entry("agent", "an agent that knows nothing of libra, over plain HTTP"),
        Entry("agent-openai", "an agent that uses OpenAI's package as it is"),
        Entry(
            "warm-start-sft",
            "random weights imitate a hundred answers",
            examined_by="warm-start-rl",
            exports_to="~/.libra/warm-start",
            curve="train/token_accuracy",
        ),
        Entry(
            "warm-start-rl",
            "the model that imitated them learns sums that nobody showed it",
            needs="warm-start-sft",
        ),
        Entry(
            "kuhn-poker-sft",
            "random weights imitate a poor player of Kuhn poker",
            examined_by="kuhn-poker-frozen",
            exports_to="~/.libra/kuhn-poker",
            curve="train/token_accuracy",
        ),
        Entry(
            "kuhn-poker",
            "a model plays poker against itself, so that its rewards sum up to 0",
            examined_by="kuhn-poker-frozen",
            needs="kuhn-poker-sft",
        ),
        Entry(
            "kuhn-poker-frozen",
            "a model learns to beat a frozen copy of itself",
            needs="kuhn-poker-sft",
        ),
        Entry(
            "mini-swe-sft",
            "random weights imitate somebody who mends repositories poorly",
            examined_by="mini-swe",
            exports_to="~/.libra/mini-swe",
            curve="train/token_accuracy",
        ),
        Entry(
            "mini-swe",
            "mini-swe-agent as it is, in a sandbox for each trajectory",
            needs="mini-swe-sft",
            further_seeds=(1, 2),
        ),
        Entry("smollm2", "a language model of 135 million parameters, downloaded"),
        Entry("mixture", "a mixture of experts"),
        Entry("elastic", "a slot changes sides, and a server is killed", kills_a_server=True),
    )
}
"""By name, in the order in which they are run and shown."""
