"""What events quote has no secret, nothing that a terminal obeys, and an end."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, SecretStr

from libra_cli.config.errors import HostError
from libra_cli.config.secrets import known_secrets, masker
from libra_cli.core import events as e
from libra_cli.core.types import GroupId, TrajectoryId
from libra_cli.runtime.supervision.quotations import (
    LONGEST,
    masked_errors,
    quoted,
    with_quotations,
)

MASK = masker(["s3cret-value"])


def test_the_reason_of_an_event_is_masked_and_printable():
    said = "login s3cret-value \x1b]0;owned\x07 \udcff \u202e failed"
    event = e.EpisodeFailed(TrajectoryId(GroupId(0), 0), said)
    told = with_quotations(event, MASK)
    assert told.trajectory == event.trajectory
    assert told.reason.startswith("login [masked] \\x1b]0;owned\\x07 \\udcff")


def test_an_event_that_quotes_nothing_stays_the_same_object():
    event = e.RunStarted()
    assert with_quotations(event, MASK) is event


def test_of_a_long_quotation_its_beginning_and_its_end_are_kept():
    told = quoted("begin" + "x" * 50_000_000 + "end", MASK)
    assert told.startswith("begin")
    assert told.endswith("end")
    assert len(told) < LONGEST + 20


def test_errors_pass_masked():
    with pytest.raises(HostError) as caught, masked_errors(MASK):
        raise HostError("no s3cret-value", hint="try s3cret-value")
    assert str(caught.value) == "no [masked]"
    assert caught.value.hint == "try [masked]"


class Part(BaseModel):
    secrets: dict[str, SecretStr]


class Whole(BaseModel):
    parts: list[Part]
    one: SecretStr
    name: str = "public"


def test_every_secret_of_a_recipe_is_known():
    whole = Whole(parts=[Part(secrets={"A": SecretStr("first")})], one=SecretStr("second"))
    assert known_secrets(whole) == ["first", "second"]
