"""Unmodified clients train: each plays a GRPO step of its own against real vLLM and a trainer.

Of every client one way of talking, since starting processes is what costs the time; all of them,
with Claude Code and Codex, whose prompts take minutes on a CPU, are in the table that
``python -m tests.clients.live_run`` prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.catalogue import CLIENTS, prepare
from tests.clients.live_run import Played, model_of, played, recipe_text
from tests.live import live, require

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(2400),
]
require("vllm")

BRINGING_THEIR_TOOL = (
    "openai with tokens",
    "openai by id",
    "anthropic, streamed",
    "openai-agents",
    "langgraph",
    "pydantic-ai",
)
WITH_LONG_PROMPTS = ("smolagents", "mini-swe-agent")
LARGEST_GAP = 1e-4
"""Nats. Other tokens than those that were sampled are whole nats apart."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[dict[str, Played]]:
    """What became of each, by name, in one run."""
    names = BRINGING_THEIR_TOOL + WITH_LONG_PROMPTS
    for environment in {client.environment for client in CLIENTS if client.name in names}:
        prepare(environment)
    base = tmp_path_factory.mktemp("clients")
    model = model_of(base, models)
    text = recipe_text(base, model, names, match="strict", group_size=2)
    with live(text, base, Path.home()) as run:
        yield {one.client: one for one in played(run, names)}


@pytest.mark.parametrize("name", BRINGING_THEIR_TOOL)
def test_every_turn_goes_on_with_the_exact_tokens(trained: dict[str, Played], name: str) -> None:
    assert trained[name].requests > 2
    assert trained[name].kept == 1.0
    assert trained[name].branches == 0


@pytest.mark.parametrize("name", BRINGING_THEIR_TOOL + WITH_LONG_PROMPTS)
def test_server_and_trainer_agree_on_what_was_generated(
    trained: dict[str, Played], name: str
) -> None:
    gap = trained[name].gap
    assert gap is not None
    assert gap < LARGEST_GAP


@pytest.mark.parametrize("name", WITH_LONG_PROMPTS)
def test_a_client_that_rewrites_or_drops_replies_goes_on_in_branches(
    trained: dict[str, Played], name: str
) -> None:
    """smolagents rewrites tool calls, mini-swe-agent drops replies that have none."""
    assert trained[name].requests > 2
    assert trained[name].branches > 0
