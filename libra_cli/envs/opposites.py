"""The environment ``opposites``: name the opposite of a word, and again if it was wrong.

A task is ``{"word": str, "opposite": str}``. An answer is right if its last word is the opposite:
``cold`` and ``The opposite of hot is cold.`` are, and what goes on after that is not. After a wrong
answer the user says so and asks again, until ``tries`` answers were given. The score is 1 if the
last answer is right, else 0.

The words are English and common, so that a language model of a hundred million parameters knows
many of them. A policy that is trained on the words ``train`` and evaluated on ``held_out`` shows
what it has learned beside those words themselves. There are no tools, and a conversation has less
than a hundred tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema

SYSTEM = "Answer with one word."


def _pairs(words: str) -> tuple[tuple[str, str], ...]:
    each = words.split()
    return tuple(zip(each[::2], each[1::2], strict=True))


TRAIN = _pairs("""
hot cold      up down         fast slow       old new          rich poor
day night     wet dry         left right      high low         hard soft
long short    light dark      win lose        buy sell         true false
in out        first last      right wrong     young old        thick thin
noisy quiet   clean dirty     above below     alive dead       north south
begin end     loud quiet      deep shallow    cheap expensive  tall short
heavy light   inside outside  always never    war peace        smooth rough
hero villain  question answer public private  guilty innocent  increase decrease
""")
HELD_OUT = _pairs("""
big small     open closed     happy sad         black white       early late
full empty    strong weak     love hate         push pull         near far
good bad      wide narrow     before after      male female       east west
give take     safe dangerous  remember forget   start stop        brave cowardly
friend enemy  sharp blunt     top bottom        positive negative success failure
major minor   attack defend   maximum minimum   heaven hell       horizontal vertical
import export summer winter
""")
WORDS = {"all": TRAIN + HELD_OUT, "train": TRAIN, "held_out": HELD_OUT}
"""Words with their opposites, by what ``words`` may be; no word of ``train`` is in ``held_out``, on
either side."""


class Opposites:
    """One word of ``words``, which is ``all``, ``train`` or ``held_out``; ``tries`` answers may be
    given.

    Raises:
        ValueError: ``tries`` is below 1, or ``words`` is none of the three.
    """

    tools: Sequence[ToolSchema] = ()

    def __init__(self, *, tries: int = 2, words: str = "all") -> None:
        if tries < 1:
            raise ValueError(f"tries must be 1 or more, got {tries}")
        if words not in WORDS:
            raise ValueError(f"words must be one of {', '.join(WORDS)}, got {words}")
        self._pairs = WORDS[words]
        self._left = self._tries = tries
        self._opposite = ""

    def task(self, index: int, seed: int) -> Task:
        """Draw word ``index`` of the stream that ``seed`` names: every word once, in an order drawn
        at random, before any comes again."""
        deal, place = divmod(index, len(self._pairs))
        order = random.Random(f"opposites {seed} {deal}").sample(self._pairs, len(self._pairs))
        word, opposite = order[place]
        return {"word": word, "opposite": opposite}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Ask for the opposite of the task's word."""
        self._left, self._opposite = self._tries, str(task["opposite"])
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is the opposite of {task['word']}?"},
        ]

    def step(self, call: ToolCall) -> str:
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
