"""The protocol of an environment: an object per trajectory, with five members and some more.

The recipe names a factory: a callable that, given ``environment.args`` as keywords, returns an
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

The caller promises that ``reset`` comes first and once; then ``step`` for each tool call, one at a
time, in order; then ``score`` at most once, with the text of the last turn. Calls may come from
different threads, never two at once. The environment promises that the same task and seed give the
same episode, so that the rewards of a group can be compared.

The end of a call decides what the model reads and what is recorded:

    returns a string       the observation, outcome ok
    returns a StepResult   its text, outcome ok; it may carry a reward and end the episode
    raises ToolFailed      its message is the observation, outcome error
    raises Finished        the episode is over and is scored; nothing more is generated
    takes too long         "tool timed out" is the observation, outcome timeout
    raises anything else   the environment broke: the trajectory is retried, and never scored

Every member but ``tools`` may be ``async def``; it is then awaited on the event loop of its
process. What follows is optional:

    reply(text)                   called with the text of a turn that has no tool call: what the
                                  user says next, as a list of messages or a Reply. None ends the
                                  episode, as does every such turn where there is no ``reply``
    score(answer, conversation)   ``conversation`` are all messages of the episode, with what the
                                  model said, its tool calls and what came back
    metrics()                     after ``score``: named numbers, shown as ``env/NAME``
    close()                       the episode is over, however it ended
    preparations(), prepare(task) what ``reset`` would else make once on each host: the first lists
                                  the tasks that want it here, with as few keys as name them; the
                                  second does it for one of them, and may take as long as it likes
    a parameter ``secrets``       of the factory: gets the recipe's, by name, if it has any
    a parameter ``sandbox``       of the factory: gets ``envs.sandbox.sandboxes.Sandboxes``, which
                                  open what the recipe's ``environment.sandbox`` describes
    a parameter ``run_directory`` of the factory: gets the path of the run's directory, in which
                                  the environment may keep files; None outside a run

**Several roles.** An environment with ``roles``, a sequence of names, is played by several
speakers, one at a time. Each has a conversation of its own, and reads nothing else:

    reset(task, seed)    returns a NextTurn: which role speaks first, and the messages that it reads
    step, reply          may return a NextTurn: which role speaks next, and what it reads then, all
                         that it has not read yet; anything else is for the role that has spoken
    tools                may be a mapping from roles to lists; a list is for all of them
    score(answer, ...)   returns a mapping from roles to rewards, and gets as ``conversation`` a
                         mapping from roles to their messages; ``answer`` is the last turn's
    reply                is what a turn without a tool call comes to; without it that turn is last

**Agents in its sandbox.** An environment that opens a sandbox for its episode may have
``agent_place()``, which returns an ``envs.agents.enclosed.AgentPlace``. With ``agent.in_sandbox``
the agent runs there in place of ``step`` and ``reply``, and ``score`` looks at what it has left.

Rewards on the way (of StepResult, Reply and Finished) are added to the score, and kept by turn for
estimators that weigh turns (``libra help advantages``). ``tools`` may change:
it is read again after each ``step`` and ``reply``, and calls are checked against the new list; the
prompt shows that of ``reset``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypeAlias, TypedDict, runtime_checkable

Task: TypeAlias = Mapping[str, Any]
"""The data of one problem: a line of the tasks file, or made by ``task``."""
ToolSchema: TypeAlias = Mapping[str, Any]
"""A tool as OpenAI's Chat Completions describe it, with a JSON Schema of its parameters: ``{"type":
"function", "function": {"name", "description", "parameters"}}``."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed request to run a tool.

    If ``tools`` has schemas, the name, the required arguments and their types one level deep have
    been checked against them; the environment checks everything else.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Message(TypedDict):
    """One message of a conversation, with the keys that chat templates read."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[ToolCall]]
    """The calls of an assistant's turn that could be read, in order."""
    reasoning: NotRequired[str]
    """The thinking of an assistant's turn, which ``content`` is without."""
    name: NotRequired[str]
    """The tool whose text this is, or who speaks."""
    images: NotRequired[Sequence[bytes]]
    """PNG files that stand before the text, for models that see (``libra help models``)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """A tool's text, with a reward on the way, or with the end of the episode."""

    text: str
    reward: float = 0.0
    done: bool = False
    """The episode is over: it is scored, and nothing is generated upon the text."""
    images: Sequence[bytes] = ()
    """PNG files that the model sees before the text."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the user says to an answer; none of it is shown to the model if ``done``."""

    messages: Sequence[Message]
    """Messages of the roles ``user`` and ``system``."""
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True, slots=True)
class NextTurn:
    """Which role of an environment with ``roles`` speaks next, and what it reads then."""

    role: str = ""
    """A name of ``roles``; it says nothing if ``done``."""
    messages: Sequence[Message] = ()
    """All that the role has not read yet, without images. Before its first turn they may be of any
    kind, with a system prompt of its own; later of ``user`` and ``system``."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What roles have earned since the turn before, by name."""
    done: bool = False
    """The episode is over: it is scored, and nobody reads the messages."""
    text: str = ""
    """What the tool says, of ``step``: the role that called it reads it when it speaks again."""


class ToolFailed(Exception):
    """A tool refuses a call; the model reads the message."""


class Finished(Exception):
    """Raised by ``step`` or ``reply``: the episode is over and is scored."""

    def __init__(self, observation: str = "", reward: float = 0.0) -> None:
        """``observation`` ends the conversation, and nothing is generated upon it."""
        super().__init__(observation)
        self.observation = observation
        self.reward = reward


@runtime_checkable
class Environment(Protocol):
    """What every environment has; the docstring above tells what it may have besides."""

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The schemas that the model is shown; empty if there are none."""

    def task(self, index: int, seed: int) -> Task:
        """Make task ``index`` of the stream ``seed``, for a recipe without a tasks file.

        It is defined for every index >= 0 and keeps no state, so any process can make it again.
        """

    def reset(self, task: Task, seed: int) -> list[Message] | NextTurn:
        """Begin the episode and return the messages that the model starts from."""

    def step(self, call: ToolCall) -> str | StepResult | NextTurn:
        """Run one tool call and return the text that the model reads.

        Raises:
            ToolFailed: the model should read the message instead.
            Finished: the episode is over.
        """

    def score(self, answer: str) -> float | Mapping[str, float]:
        """Return the reward, given the text of the last turn without thinking and tool calls; with
        ``roles`` that of each role.
        """


def function(
    name: str, description: str, properties: Mapping[str, Any], *, required: Sequence[str] = ()
) -> ToolSchema:
    """Return the schema of a tool; all properties are required unless ``required`` names some."""
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
