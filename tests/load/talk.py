"""An environment that talks: for ever and at once, or for some turns with pauses."""

from __future__ import annotations

import asyncio
import random

from libra_cli.envs.protocol import Message, Reply, Task, ToolCall, ToolFailed


class Talk:
    """Says one word to whatever it is told."""

    tools = ()

    def __init__(self, most_turns: int = 0, pause_s: float = 0.0) -> None:
        """At most so many turns, drawn for each episode, 0 is for ever; ``pause_s`` before each."""
        self._most_turns = most_turns
        self._pause_s = pause_s
        self._turns = 0
        self._worth = 0.0

    def task(self, index: int, seed: int) -> Task:
        """Any task is as good as another."""
        return {"index": index}

    async def reset(self, task: Task, seed: int) -> list[Message]:
        """Begin to talk."""
        drawn = random.Random(repr((task["index"], seed)))
        self._turns = drawn.randint(1, self._most_turns) if self._most_turns else 1 << 30
        self._worth = drawn.random()
        return [{"role": "user", "content": "a"}]

    async def step(self, call: ToolCall) -> str:
        """Nobody calls a tool here."""
        raise ToolFailed(f"there is no {call.name}")

    async def reply(self, text: str) -> Reply:
        """Go on talking."""
        if self._pause_s:
            await asyncio.sleep(self._pause_s)
        self._turns -= 1
        return Reply([{"role": "user", "content": "b"}], done=self._turns <= 0)

    async def score(self, answer: str) -> float:
        """What was drawn: nothing is learned here."""
        return self._worth
