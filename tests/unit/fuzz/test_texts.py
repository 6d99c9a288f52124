"""Texts of anybody, made safe to print, to store and to tell."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.secrets import masker
from libra_cli.config.text import encodable, one_line, printable
from libra_cli.runtime.supervision.quotations import quoted
from tests.unit.fuzz import nonsense

MASK = masker(["s3cret-value", "x", ""])


@given(text=nonsense.texts | st.text(st.characters()))
def test_a_text_is_made_safe(text):
    with nonsense.thrown_at("texts"):
        shown = printable(text)
        assert printable(shown) == shown
        assert all(one in "\n\t" or one.isprintable() or ord(one) > 0x9F for one in shown)
        encodable(text).encode()
        shown.encode()
        assert "\n" not in one_line(text)
        quoted(text, MASK).encode()


@given(around=nonsense.texts, after=nonsense.texts)
def test_a_known_secret_is_masked_wherever_it_stands(around, after):
    with nonsense.thrown_at("secrets"):
        assert "s3cret-value" not in MASK(f"{around}s3cret-value{after}")


@pytest.mark.parametrize(
    "part", ["key=", "token ", "a.", "://a:", "Bearer ", "-----BEGIN ", "eyJa."]
)
def test_masking_takes_time_that_grows_with_the_text(part):
    started = time.process_time()
    MASK(part * (100_000 // len(part)))
    assert time.process_time() - started < 1.0
