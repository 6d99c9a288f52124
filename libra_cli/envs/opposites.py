"""The environment ``opposites``: name the opposite of a word, and again if it was wrong.

A task is ``{"word": str, "opposite": str}``. An answer is right if its last word is the opposite:
``cold`` and ``The opposite of hot is cold.`` are, and what goes on after that is not. After a wrong
answer the user says so and asks again, until ``tries`` answers were given. The score is 1 if the
last answer is right, else 0.

The words are English and common, so that a language model of a hundred million parameters knows
many of them. There are no tools, and a conversation has less than a hundred tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema

SYSTEM = "Answer with one word."
_WORDS = """
hot cold      big small    up down         fast slow       old new           rich poor
day night     wet dry      open closed     happy sad       left right        black white
high low      early late   full empty      hard soft       strong weak       long short
light dark    win lose     love hate       buy sell        push pull         true false
in out        near far     first last      good bad        right wrong       young old
thick thin    wide narrow  clean dirty     noisy quiet     above below       before after
alive dead    male female  north south     east west       begin end         give take
loud quiet    deep shallow cheap expensive safe dangerous  tall short        heavy light
inside outside             always never    remember forget start stop        brave cowardly
war peace     friend enemy smooth rough    sharp blunt     question answer   top bottom
"""
PAIRS = tuple(zip(_WORDS.split()[::2], _WORDS.split()[1::2], strict=True))
"""Words with their opposites; no word is asked for in two pairs."""


class Opposites:
    """One word; ``tries`` answers may be given.

    Raises:
        ValueError: ``tries`` is below 1.
    """

    tools: Sequence[ToolSchema] = ()

    def __init__(self, *, tries: int = 2) -> None:
        if tries < 1:
            raise ValueError(f"tries must be 1 or more, got {tries}")
        self._left = self._tries = tries
        self._opposite = ""

    def task(self, index: int, seed: int) -> Task:
        """Draw word ``index`` of the stream that ``seed`` names."""
        word, opposite = random.Random(f"opposites {seed} {index}").choice(PAIRS)
        return {"word": word, "opposite": opposite}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Ask for the opposite of the task's word."""
        self._left, self._opposite = self._tries, str(task["opposite"])
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is the opposite of {task['word']}?"},
        ]

    def step(self, call: ToolCall) -> str:
        """Refuse: there are no tools."""
        raise ToolFailed("there are no tools")

    def reply(self, text: str) -> list[Message] | None:
        """Ask again after a wrong answer, while there are tries left."""
        self._left -= 1
        if self._left <= 0 or self._is_right(text):
            return None
        return [{"role": "user", "content": "No. Try again."}]

    def score(self, answer: str) -> float:
        """Return 1 if the last word of the answer is the opposite, else 0."""
        return float(self._is_right(answer))

    def _is_right(self, text: str) -> bool:
        return re.findall(r"[a-z]+", text.lower())[-1:] == [self._opposite]
