"""Trajectories with their text, for people to read: decoded when a monitor asks for it.

The record of a trajectory that has ended has its tokens, and the run directory has the model's
tokenizer, so nothing is decoded that nobody looks at, and nothing while the run's loop waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from libra_cli.core.records import TrajectoryRecord

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_TEXT = 20_000
"""Characters of a sample's text that monitors are shown; the middle of a longer one is left out."""
COLUMNS = ("step", "trajectory", "reward", "turns", "generated_tokens", "text")
"""Names of the columns of a table of samples, of which ``table_row`` makes the rows."""


class Decoder:
    """The tokenizer of a run's model; loaded when it is first asked for, by any thread."""

    def __init__(self, model_dir: Path) -> None:
        self._path = model_dir / "tokenizer.json"
        self._lock = Lock()
        self._tokenizer: Tokenizer | None = None

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, control tokens included: what the model saw and said.

        Raises:
            OSError: the run has no tokenizer yet.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _load(self) -> Tokenizer:
        from tokenizers import Tokenizer

        if not self._path.is_file():
            raise FileNotFoundError(f"there is no {self._path}")
        return Tokenizer.from_file(str(self._path))


class SampledTrajectory:
    """A trajectory that has ended since the step before, with its text."""

    def __init__(self, record: TrajectoryRecord, decode: Callable[[Sequence[int]], str]) -> None:
        self._record = record
        self._decode = decode

    @property
    def name(self) -> str:
        """Group, member and attempt, for example ``17.3.0``."""
        return f"{self._record.group_id}.{self._record.member}.{self._record.attempt}"

    @property
    def reward(self) -> float:
        """The reward, where 0 stands for a trajectory that has none."""
        return self._record.reward or 0.0

    @property
    def turns(self) -> int:
        return self._record.turns

    @property
    def generated_tokens(self) -> int:
        return self._record.generated_tokens

    @cached_property
    def text(self) -> str:
        """All of it, prompt and tools included, with the template's control tokens.

        An agent that has left its conversation for another has several of them.
        """
        texts = [self._decode(branch.token_ids) for branch in self._record.tokens]
        text = "\n\n[another branch]\n\n".join(texts)
        surplus = len(text) - LONGEST_TEXT
        if surplus <= 0:
            return text
        half = LONGEST_TEXT // 2
        return f"{text[:half]}\n[{surplus} characters left out]\n{text[-half:]}"


def table_row(step: int, sample: SampledTrajectory) -> list[str | int | float]:
    numbers = [sample.reward, sample.turns, sample.generated_tokens]
    return [step, sample.name, *numbers, sample.text]


def as_markdown(sample: SampledTrajectory) -> str:
    """The sample as a heading and a block of text that no Markdown in it can end."""
    said = f"trajectory {sample.name}, reward {sample.reward:g}, {sample.turns} turns"
    body = "\n".join(f"    {line}" for line in sample.text.splitlines())
    return f"### {said}\n\n{body}\n"
