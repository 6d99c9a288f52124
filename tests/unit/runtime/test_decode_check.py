"""When servers compare what they decode with what they score, and what is said of it."""

from __future__ import annotations

import asyncio
import math
from array import array
from typing import Any

import pytest

from libra_cli.config.errors import LibraError, ServerError
from libra_cli.config.recipe import ModelSpec
from libra_cli.core.actions import Generate, SyncServer
from libra_cli.core.events import PublishedVersion, TurnFailed, TurnGenerated
from libra_cli.core.types import Pool, Slot, VersionSpan, WeightVersion
from libra_cli.runtime.rollout.connection import Sampling, ServerUnreachable, turn_failed
from libra_cli.runtime.rollout.decode_check import EVERY, EXPECTED, PROMPT, DecodeCheck

PROBE = tuple(range(64))
SCORED = -2.0
PUBLISHED = PublishedVersion(WeightVersion(1, 7), 0, 0.0)


class Server:
    """Scores all tokens the same, and decodes with log-probabilities that are off by ``gap``."""

    def __init__(self, gap: float = 0.0, fails: str = "", away: bool = False) -> None:
        self.gap, self.fails, self.away = gap, fails, away
        self.asked: list[Generate] = []
        self.scored: list[list[int]] = []

    async def check(self) -> None:
        if self.away:
            raise ServerUnreachable("no route")

    async def generate(
        self, action: Generate, sampling: Sampling, images: Any = ()
    ) -> TurnGenerated | TurnFailed:
        assert sampling.to_the_end
        self.asked.append(action)
        if self.fails:
            return turn_failed(action, self.fails)
        tokens = action.max_tokens
        return TurnGenerated(
            request=action.request,
            trajectory=action.trajectory,
            slot=action.slot,
            incarnation=action.incarnation,
            prompt_ids=action.prompt_ids,
            token_ids=array("i", range(100, 100 + tokens)),
            logprobs=array("f", [SCORED + self.gap] * tokens),
            spans=(VersionSpan(7, 0, tokens),),
            newest=action.cache_key,
            cache_key=action.cache_key,
            finish_reason="length",
            started_at=0.0,
        )

    async def probe(self, token_ids: list[int], published: PublishedVersion) -> list[float]:
        self.scored.append(token_ids)
        return [SCORED] * (len(token_ids) - 1)


def checked(dtype: str = "float32", tolerance: float | None = None) -> DecodeCheck:
    return DecodeCheck(ModelSpec.model_validate({"path": "/m", "dtype": dtype}), tolerance)


def said(
    check: DecodeCheck, server: Server, *, slot: str = "n/0", incarnation: int = 1, gpus: int = 0
) -> str:
    """What is said after another version."""
    where = Slot(slot, "n", tuple(range(gpus)), Pool.ROLLOUT)
    action = SyncServer(slot, incarnation, PUBLISHED)
    return asyncio.run(check.reason(server, where, action, PROBE))  # type: ignore[arg-type]


def test_the_first_version_of_a_process_is_compared_and_every_twentieth() -> None:
    check, server = checked(), Server()
    for number in range(2 * EVERY + 1):
        assert not said(check, server)
        assert len(server.asked) == 1 + number // EVERY
    assert not said(check, server, incarnation=2)
    assert not said(check, server, slot="n/1")
    assert len(server.asked) == 5


def test_the_tokens_that_were_decoded_are_scored_after_the_same_prompt() -> None:
    server = Server()
    said(checked(), server)
    (asked,), (scored,) = server.asked, server.scored
    assert asked.cache_key == PUBLISHED.version
    assert tuple(scored[:PROMPT]) == tuple(asked.prompt_ids) == PROBE[:PROMPT]
    assert scored[PROMPT:] == list(range(100, 100 + asked.max_tokens))


@pytest.mark.parametrize("gap", [0.5, -0.5, math.nan])
def test_a_server_that_decodes_something_else_is_told_and_asked_again_at_the_next_try(
    gap: float,
) -> None:
    check, server = checked("bfloat16"), Server(gap)
    for tries in (1, 2):
        reason = said(check, server)
        assert "decoding differs from scoring the same tokens by" in reason
        assert "allowed is 0.2" in reason
        assert "engine: safe" in reason
        assert len(server.asked) == tries


@pytest.mark.parametrize(("dtype", "gpus"), EXPECTED)
def test_what_is_allowed_depends_on_the_format_and_on_the_hardware(dtype: str, gpus: bool) -> None:
    expected = EXPECTED[dtype, gpus]  # type: ignore[index]
    inside, outside = Server(0.9 * expected.first), Server(1.1 * expected.first)
    assert not said(checked(dtype), inside, gpus=int(gpus))
    assert said(checked(dtype), outside, gpus=int(gpus))


def test_later_a_gap_may_be_a_few_times_the_first() -> None:
    check, server = checked("bfloat16"), Server(0.001)
    for _ in range(EVERY):
        assert not said(check, server)
    server.gap = 1.1 * EXPECTED["bfloat16", False].later
    assert said(check, server)


def test_the_recipe_may_allow_more() -> None:
    assert not said(checked("bfloat16", tolerance=0.6), Server(0.5))
    assert said(checked("bfloat16", tolerance=0.6), Server(0.7))
    assert not said(checked("bfloat16", tolerance=0.001), Server(0.1))


@pytest.mark.parametrize(("away", "error"), [(True, ServerUnreachable), (False, ServerError)])
def test_a_server_without_an_answer_is_blamed_only_if_it_can_be_reached(
    away: bool, error: type[LibraError]
) -> None:
    with pytest.raises(error) as told:
        said(checked(), Server(fails="out of memory", away=away))
    assert type(told.value) is error
