"""Ends turns at strings, of which the engine core knows nothing: it stops at tokens alone.

In a server of vLLM's own its front end turns tokens into text and looks for the strings; here that
part of it, ``IncrementalDetokenizer``, does the same beside the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import AutoTokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer


class StopStrings:
    """The texts of the turns that end at a string, by the names of the turns."""

    def __init__(self, tokenizer_dir: str) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._texts: dict[str, IncrementalDetokenizer] = {}

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._tokenizer_dir)

    def watch(self, request: EngineCoreRequest, stops: Sequence[str]) -> None:
        """Have the turn of a request end where its own text has one of ``stops``.

        Raises:
            OSError: this model has no tokenizer.
        """
        params = copy.copy(request.sampling_params)
        # Special tokens are text too: who names one as a string means it.
        params.stop, params.skip_special_tokens = list(stops), False
        params.include_stop_str_in_output = True
        told = copy.copy(request)
        told.sampling_params = params
        self._texts[request.request_id] = IncrementalDetokenizer.from_new_request(
            self._tokenizer, told
        )

    def tokens_kept(self, name: str, token_ids: Sequence[int]) -> int | None:
        """Return how many of a turn's new tokens there are up to the one with which its text has a
        stop string; None while it has none."""
        text = self._texts.get(name)
        if text is None:
            return None
        for kept, token in enumerate(token_ids, 1):
            if text.update([token], False) is not None:
                return kept
        return None

    def forget(self, name: str) -> None:
        """Let go of a turn that has ended."""
        self._texts.pop(name, None)
