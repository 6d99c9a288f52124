"""The section of a recipe that turns speculative decoding on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from libra_cli.config.fields import Positive, Section
from libra_cli.config.on_resume import MAY_CHANGE
from libra_cli.config.only_with import only_with
from libra_cli.config.problems import Problem


class SpeculativeSpec(Section):
    """Speculative decoding: a server guesses a turn's next tokens from text that it has seen, and
    checks all guesses in one step. What is sampled, and its log-probabilities, stay the policy's.
    Each server drafts only at loads where that gives more tokens a second. Keys are those of vLLM's
    speculative_config; ``{}`` for the defaults."""

    on_resume = MAY_CHANGE

    method: Literal["ngram", "suffix"] = "ngram"
    """The source of drafts: ``ngram``, what followed the last tokens earlier in the same turn's
    context; ``suffix``, also in other turns that the server has generated (arXiv 2411.04975; needs
    the package arctic-inference on hosts).
    """
    num_speculative_tokens: Positive = 3
    """The most tokens of a draft."""
    prompt_lookup_max: Annotated[Positive, only_with("method", "ngram")] = 4
    """The most tokens at the end of a context that are looked up earlier in it."""
    prompt_lookup_min: Annotated[Positive, only_with("method", "ngram")] = 2
    """The fewest tokens at the end of a context that are looked up earlier in it."""

    def problems(self) -> Iterator[Problem]:
        """Yield bounds of the look-up that no length meets."""
        if self.prompt_lookup_min > self.prompt_lookup_max:
            yield Problem(
                ("prompt_lookup_min", "prompt_lookup_max"),
                f"is {self.prompt_lookup_min}, and prompt_lookup_max is {self.prompt_lookup_max}: "
                "no length lies between them",
            )

    @property
    def flags(self) -> dict[str, str | int]:
        """The settings as vLLM's ``speculative_config``."""
        flags: dict[str, str | int] = {
            "method": self.method,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        if self.method == "ngram":
            flags["prompt_lookup_max"] = self.prompt_lookup_max
            flags["prompt_lookup_min"] = self.prompt_lookup_min
        return flags
