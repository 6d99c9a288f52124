"""A teacher in this process, in place of a server: the same numbers, from transformers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from libra_cli.core.rollout.teaching import take_logprobs, taught_branches
from libra_cli.core.types import Trajectory

ROWS = 64
"""Sequences of one pass."""


class HeldTeacher:
    """A model that says how likely it finds the tokens of trajectories."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def judge(self, trajectories: Sequence[Trajectory]) -> None:
        """Give each trajectory the log-probabilities of its tokens."""
        sequences = [branch.token_ids for one in trajectories for branch in taught_branches(one)]
        said = iter(
            values
            for first in range(0, len(sequences), ROWS)
            for values in self._logprobs(sequences[first : first + ROWS])
        )
        for one in trajectories:
            take_logprobs(one, tuple(next(said) for _ in taught_branches(one)))

    def _logprobs(self, sequences: Sequence[array[int]]) -> list[array[float]]:
        """Padding follows the tokens, which do not see it."""
        width = max(map(len, sequences))
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
        with torch.inference_mode():
            scores = torch.log_softmax(self._model(input_ids=tokens).logits[:, :-1].float(), -1)
        chosen = scores.gather(-1, tokens[:, 1:, None])[..., 0]
        return [
            array("f", [0.0, *chosen[row, : len(sequence) - 1].tolist()])
            for row, sequence in enumerate(sequences)
        ]
