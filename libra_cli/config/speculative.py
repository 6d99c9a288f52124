"""The section of a recipe that turns speculative decoding on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from libra_cli.config.fields import Positive, Section
from libra_cli.config.on_resume import MAY_CHANGE
from libra_cli.config.only_with import only_with
from libra_cli.config.problems import Problem


class SpeculativeSpec(Section):
    """Speculative decoding: a server guesses a turn's next tokens, from text that it has seen or
    with a small model, and checks all guesses in one step. What is sampled, and its
    log-probabilities, stay the policy's. Each server drafts only at loads where that gives more
    tokens a second. Keys are those of vLLM's speculative_config; ``{}`` for the defaults."""

    on_resume = MAY_CHANGE

    method: Literal["ngram", "suffix", "eagle", "eagle3", "mtp"] = "ngram"
    """The source of drafts: ``ngram``, what followed the last tokens earlier in the same turn's
    context; ``suffix``, also in other turns that the server has generated (arXiv 2411.04975; needs
    the package arctic-inference on hosts); ``eagle`` and ``eagle3``, a head that was trained for
    this model (arXiv 2401.15077, 2503.01840); ``mtp``, the layers for it that are in the model's
    own files (GLM 4.5, Qwen3-Next, Qwen3.5). Heads are not trained by the run.
    """
    model: str | None = None
    """The absolute path of the head's directory on every host that serves, with safetensors files
    and a config.json; only with ``eagle`` and ``eagle3``.
    """
    num_speculative_tokens: Positive = 3
    """The most tokens of a draft."""
    prompt_lookup_max: Annotated[Positive, only_with("method", "ngram")] = 4
    """The most tokens at the end of a context that are looked up earlier in it."""
    prompt_lookup_min: Annotated[Positive, only_with("method", "ngram")] = 2
    """The fewest tokens at the end of a context that are looked up earlier in it."""

    def problems(self) -> Iterator[Problem]:
        """Yield bounds of the look-up that no length meets, and a head missing or not used."""
        if self.model is None and self.has_own_directory:
            yield Problem(
                ("model", "method"),
                f"is missing: method: {self.method} drafts with a head, so name its directory",
            )
        elif self.model is not None and not self.has_own_directory:
            yield Problem(
                ("model", "method"),
                f"is {self.model}, and method: {self.method} takes no head: leave it out",
            )
        elif self.model is not None and not self.model.startswith("/"):
            yield Problem(("model",), f"is {self.model}, and must be an absolute path")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            yield Problem(
                ("prompt_lookup_min", "prompt_lookup_max"),
                f"is {self.prompt_lookup_min}, and prompt_lookup_max is {self.prompt_lookup_max}: "
                "no length lies between them",
            )

    @property
    def has_own_directory(self) -> bool:
        """Whether a head with a directory of its own drafts."""
        return self.method in ("eagle", "eagle3")

    @property
    def has_head(self) -> bool:
        """Whether a model drafts, which servers hold beside the policy."""
        return self.has_own_directory or self.method == "mtp"

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
        if self.model is not None:
            flags["model"] = self.model
        return flags
