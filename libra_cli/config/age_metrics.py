"""The names by which a trainer tells what tokens of each age are worth, and the core reads it."""

from __future__ import annotations

from typing import Final

OLDEST: Final = 8
"""Versions; older tokens, which only the rests of closed groups have, count as so old."""
AGE_TOKENS: Final = "staleness/age_{}_tokens"
"""Generated tokens of a step that are so many versions behind, by the age."""
AGE_WORTH: Final = "staleness/age_{}_worth"
"""The share of these that they are worth, as ``core.token_worth`` has it, by the age."""
AGE_KL: Final = "staleness/age_{}_kl"
"""The KL divergence of the trainer's policy from theirs, in nats a token (k3), by the age."""
