"""The environment ``trl``: a class that was written for TRL's ``environment_factory``.

Such a class needs neither trl nor transformers. Its ``reset(**row)`` begins an episode and may
return a text, which is added to the prompt; ``get_reward()``, if there is one, is the reward. Every
other method whose name does not begin with an underscore is a tool, described to the model by its
annotations and its docstring (``envs.adapters.tool_schema``)::

    environment:
      name: trl
      args: {factory: my_package.games:WordleEnv, rewards: [my_package.games:brevity]}
      tasks: words.jsonl

A row of the tasks goes to ``reset`` as keywords, those that it takes. The row's ``prompt`` is a
text or messages. Without a tasks file a row is an empty prompt and a seed, so ``reset`` must take
one: the members of a group must play the same problem, or their rewards could not be compared.

``rewards`` are TRL's reward functions ``f(prompts, completions, **columns)``, called with lists of
length one, with the row's columns and with ``environments``. What they return is multiplied with
``reward_weights`` and added up together with ``get_reward``. A None does not count. They are not
given ``completion_ids``, ``trainer_state``, ``log_extra`` and ``log_metric``, which are the
trainer's.

As in TRL, a tool that raises lets the model read ``{'error': ...}``, and members may be ``async``;
these run in one event loop of the process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.config.plugins import PluginGroup
from libra_cli.envs.adapters.content import messages_of, text_of
from libra_cli.envs.adapters.tool_schema import tool_of
from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema
from libra_cli.plugins.finding import find

_OWN = ("reset", "get_reward")
_CODE = PluginGroup("libra.trl", "TRL class or function", {}, error=EnvironmentBroken)


class TrlEnvironment:
    """One episode of a TRL class. ``factory`` and ``rewards`` are ``package.module:attribute``.

    Raises:
        EnvironmentBroken: they cannot be imported, there is no reward, or a tool has no schema.
    """

    def __init__(
        self,
        factory: str,
        rewards: Sequence[str] = (),
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        make = find(_CODE, factory)
        try:
            self._inner = make()
        except Exception as error:
            raise EnvironmentBroken(
                f"{factory}() failed: {type(error).__name__}: {error}",
                hint="as with TRL's environment_factory, it is called without arguments",
            ) from error
        self._rewards = [find(_CODE, name) for name in rewards]
        self._weights = [1.0] * len(rewards) if reward_weights is None else list(reward_weights)
        if len(self._weights) != len(self._rewards):
            raise EnvironmentBroken(
                f"{len(self._rewards)} rewards have {len(self._weights)} reward_weights"
            )
        if not callable(getattr(self._inner, "reset", None)):
            raise EnvironmentBroken(f"{factory} has no method reset, which TRL's classes have")
        if not self._rewards and not hasattr(self._inner, "get_reward"):
            raise EnvironmentBroken(
                f"{factory} has no get_reward, and environment.args has no rewards",
                hint="args: {factory: ..., rewards: [package.module:function]}",
            )
        members = inspect.getmembers(type(self._inner), inspect.isfunction)
        names = [name for name, _ in members if name not in _OWN and not name.startswith("_")]
        self._tools = {name: getattr(self._inner, name) for name in names}
        self.tools: Sequence[ToolSchema] = [tool_of(method) for method in self._tools.values()]
        self._row: Task = {}
        self._prompt: list[Message] = []

    def task(self, index: int, seed: int) -> Task:
        """Make a row that holds an empty prompt and a seed.

        Raises:
            EnvironmentBroken: ``reset`` takes no seed.
        """
        if not self._takes({"seed": 0}):
            raise EnvironmentBroken(
                f"{type(self._inner).__name__}.reset takes no seed, so the members of a group "
                "would play different problems",
                hint='set environment.tasks to a file of rows such as {"prompt": "Play.", ...}, or '
                "add a parameter seed to reset and draw the problem from it",
            )
        return {"prompt": "", "seed": Random(f"{seed}/{index}").getrandbits(31)}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Begin the row's episode; what the class's ``reset`` returns is added to the prompt."""
        self._row = task
        prompt = messages_of(task.get("prompt", ""))
        seen = _finished(self._inner.reset(**self._takes(task)))
        if seen is not None:
            last = prompt[-1]
            prompt[-1] = {"role": last["role"], "content": last["content"] + text_of(seen)}
        self._prompt = prompt
        return list(prompt)

    def step(self, call: ToolCall) -> str:
        """Call the method; the model reads what it returns, or what it raises."""
        try:
            return text_of(_finished(self._tools[call.name](**call.arguments)))
        except EnvironmentBroken:
            raise
        except Exception as error:
            raise ToolFailed(str({"error": str(error)})) from error

    def score(self, answer: str, conversation: Sequence[Message] = ()) -> float:
        """Return the sum of the class's reward and the weighted reward functions."""
        total = 0.0
        if hasattr(self._inner, "get_reward"):
            total += float(_finished(self._inner.get_reward()))
        completion = [_in_trl_form(one) for one in conversation[len(self._prompt) :]]
        if not completion:
            completion = [{"role": "assistant", "content": answer}]
        for weight, function in zip(self._weights, self._rewards, strict=True):
            total += weight * self._reward(function, completion)
        return total

    def _takes(self, row: Task) -> dict[str, Any]:
        """Return the keys of a row that ``reset`` takes: all, if it has ``**kwargs``."""
        parameters = inspect.signature(self._inner.reset).parameters
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            return dict(row)
        return {key: value for key, value in row.items() if key in parameters}

    def _reward(self, function: Callable[..., Any], completion: list[dict[str, Any]]) -> float:
        columns = {k: [v] for k, v in self._row.items() if k not in ("prompt", "completion")}
        columns["environments"] = [self._inner]
        arguments = {"prompts": [list(self._prompt)], "completions": [completion], **columns}
        rewards = _finished(function(**arguments))
        if not isinstance(rewards, Sequence) or len(rewards) != 1:
            raise EnvironmentBroken(
                f"the reward function {function.__name__} returned {rewards!r}, not one reward",
                hint="it is called as f(prompts, completions, **columns) and returns a list with a "
                "number, or None, for each completion",
            )
        return 0.0 if rewards[0] is None else float(rewards[0])


def _in_trl_form(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its tool calls written as TRL, and OpenAI, write them."""
    calls = [
        {"type": "function", "function": {"name": one.name, "arguments": dict(one.arguments)}}
        for one in message.get("tool_calls", ())
    ]
    shown = {key: message[key] for key in ("role", "content", "name") if key in message}
    return {**shown, "tool_calls": calls} if calls else shown


def _finished(result: Any) -> Any:
    """Return a result, once it is there if it was of an ``async def``."""
    if not inspect.iscoroutine(result):
        return result
    coroutine: Coroutine[Any, Any, Any] = result
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Start the event loop of asynchronous members, which end with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="libra-trl", daemon=True).start()
    return loop
