"""An environment that has something to make on each host before it is played."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema


class Prepared:
    """Plays tasks of which each wants a file, which ``prepare`` makes in ``seconds``."""

    tools: Sequence[ToolSchema] = ()

    def __init__(
        self, directory: str, *, names: Sequence[str] = ("a", "b", "c"), seconds: float = 0
    ):
        self._directory = Path(directory)
        self._names = names
        self._seconds = seconds

    def preparations(self) -> list[Task]:
        return [{"name": one} for one in self._names if not (self._directory / one).exists()]

    def prepare(self, task: Task) -> None:
        if task["name"] == "broken":
            raise OSError("no space left")
        time.sleep(self._seconds)
        (self._directory / task["name"]).touch()

    def task(self, index: int, seed: int) -> Task:
        return {"name": self._names[index % len(self._names)]}

    def reset(self, task: Task, seed: int) -> list[Message]:
        assert (self._directory / task["name"]).exists(), "it was not prepared"
        return [{"role": "user", "content": "Go."}]

    def step(self, call: ToolCall) -> str:
        raise ToolFailed("there is no tool")

    def score(self, answer: str) -> float:
        return 1.0
