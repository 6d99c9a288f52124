"""A client's wish for samples, and the order for a server that it becomes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_cli.config.errors import LibraError
from libra_cli.runtime.processes.stream import Answer
from libra_cli.runtime.tinker.wire import NotServed, SampledTokens, write_sample

_NOT_SERVED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Samples of one prompt: the order that every one of them is, and how many there are."""

    samples: int
    order: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        told: Mapping[str, Any],
        *,
        max_len: int,
        stop_token_ids: Sequence[int],
    ) -> SampleOrder:
        """Read a request; ``stop_token_ids`` end a sample where the request names no others.

        Raises:
            NotServed: it wants what a server here does not tell, or is too long.
        """
        wanted = [name for name in _NOT_SERVED if told.get(name)]
        if wanted:
            raise NotServed(f"{', '.join(wanted)} is not served: leave it out")
        tokens = _tokens(told["prompt"])
        given = told.get("sampling_params", {})
        left = max_len - len(tokens)
        if left < 1:
            raise NotServed(f"the prompt has {len(tokens)} tokens, and model.max_len is {max_len}")
        strings, tokens_that_stop = _stops(given.get("stop"), stop_token_ids)
        order = {
            "prompt_ids": array("i", tokens).tobytes(),
            "max_tokens": _most(given.get("max_tokens"), left),
            "temperature": given.get("temperature", 1.0),
            "top_p": given.get("top_p", 1.0),
            "top_k": given.get("top_k", -1),
            "seed": given.get("seed"),
            "stop_token_ids": tokens_that_stop,
            "stop": strings,
            "to_the_end": True,
            "score_prompt": bool(told.get("prompt_logprobs")),
        }
        return cls(int(told.get("num_samples", 1)), order)

    def each(self, adapter: str | None) -> list[dict[str, Any]]:
        """Return the order of every sample from an adapter; a seed counts up, and the first scores
        the prompt."""
        seed = self.order["seed"]
        return [
            {
                **self.order,
                "adapter": adapter,
                "seed": None if seed is None else seed + number,
                "score_prompt": self.order["score_prompt"] and number == 0,
            }
            for number in range(self.samples)
        ]


def _most(asked: int | None, left: int) -> int:
    """Return the most tokens of a sample, of which there is room for ``left``."""
    if asked is not None and asked < 1:
        raise NotServed(f"max_tokens is {asked}, and a sample has one token at least")
    return left if asked is None else min(asked, left)


def _tokens(prompt: Mapping[str, Any]) -> list[int]:
    if any("tokens" not in chunk for chunk in prompt["chunks"]):
        raise NotServed("images and sounds are not served: a prompt may have text alone")
    return [token for chunk in prompt["chunks"] for token in chunk["tokens"]]


def _stops(
    given: str | Sequence[str] | Sequence[int] | None, usual: Sequence[int]
) -> tuple[list[str], list[int]]:
    """Return the strings and the tokens that end a sample: tokens stand in place of the ``usual``
    ones, an empty list of any, and strings beside them."""
    found = [given] if isinstance(given, str) else given
    if found is None:
        return [], list(usual)
    strings = [one for one in found if isinstance(one, str)]
    if len(strings) not in (0, len(found)) or "" in strings:
        raise NotServed(f"stop takes strings that are not empty, or ids of tokens: {given!r}")
    return strings, list(usual) if strings else [int(one) for one in found]


async def sampled(
    order: SampleOrder, adapter: str | None, sample: Callable[[Answer], Coroutine[Any, Any, Answer]]
) -> bytes:
    """Have all samples generated from an adapter, None from the model itself, and return the
    message that tells of them. Raises LibraError."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sample(one)) for one in order.each(adapter)]
    except* LibraError as errors:
        raise errors.exceptions[0] from None
    answers = [task.result() for task in tasks]
    sequences = [
        SampledTokens(one["token_ids"], one["logprobs"], one["finish_reason"] == "stop")
        for one in answers
    ]
    scored = answers[0]["prompt_logprobs"] if order.order["score_prompt"] else b""
    first = array("f", [float("nan")]).tobytes() if scored else b""
    return write_sample(sequences, first + scored)
