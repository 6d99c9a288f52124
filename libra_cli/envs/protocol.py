"""What an environment is: five members, synchronous, one object a trajectory.

An environment is any callable that, given the recipe's ``environment.args`` as keywords, returns an
object with ``tools``, ``task``, ``reset``, ``step`` and ``score``. It is found by the entry point
group ``libra.environments`` or by ``package.module:attribute`` (see ``envs.registry``).

    class Echo:
        tools = (function("echo", "Repeat the text.", {"text": {"type": "string"}}),)

        def task(self, index: int, seed: int) -> Task:
            return {"word": f"word-{index}"}

        def reset(self, task: Task, seed: int) -> list[Message]:
            self.word = task["word"]
            return [{"role": "user", "content": f"Echo {self.word}, then say it."}]

        def step(self, call: ToolCall) -> str:
            if "text" not in call.arguments:
                raise ToolFailed("echo needs a text")
            return str(call.arguments["text"])

        def score(self, answer: str) -> float:
            return float(self.word in answer)

What the caller promises: ``reset`` comes first and once; then ``step`` for each tool call, one at a
time, in order; then ``score`` at most once, with the text of the last turn. Calls may come from
different threads, never two at once. What the environment promises: the same task and seed give
the same episode (the members of a group share both), so that their rewards can be compared.

Two things are optional. A factory with a parameter ``secrets`` gets the recipe's, by name, if the
recipe has any. An environment with a method ``close`` has it called when its episode is over.

How a call ends decides what the model and the books see:

    returns a string       the observation, outcome ok
    raises ToolFailed      its message is the observation, outcome error
    takes too long         "tool timed out" is the observation, outcome timeout
    raises anything else   the environment broke: the trajectory is retried, and never scored
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

Task: TypeAlias = Mapping[str, Any]
"""What tells one episode from another; a line of the tasks file, or made by ``task``."""
ToolSchema: TypeAlias = Mapping[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``."""


class Message(TypedDict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed request to run a tool.

    Where ``tools`` has schemas, the name, the required arguments and their types one level deep
    have been checked against them; everything else is for the environment to check.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class ToolFailed(Exception):
    """The tool ran and says no. The message is what the model reads."""


@runtime_checkable
class Environment(Protocol):
    """One episode's world."""

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The schemas the model is shown; empty if there are none."""

    def task(self, index: int, seed: int) -> Task:
        """Task number ``index`` of the stream, when the recipe names no tasks file.

        Defined for every index >= 0, without state, so that any process can make it again.
        """

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Begin the episode; the messages the model starts from."""

    def step(self, call: ToolCall) -> str:
        """Run one tool call; raise ToolFailed for an error the model should read."""

    def score(self, answer: str) -> float:
        """The reward, given the text of the last turn."""


def function(
    name: str, description: str, properties: Mapping[str, Any], *, required: Sequence[str] = ()
) -> ToolSchema:
    """The schema of one tool; every property is required unless ``required`` says otherwise."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": dict(properties),
                "required": list(required or properties),
            },
        },
    }
