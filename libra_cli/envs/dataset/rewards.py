"""Rewards by name: those that ship with libra, and Python functions as TRL and verl call them.

A function is called by the names of its parameters:

    TRL     f(prompts, completions, **columns) -> list[float | None]
            Lists of one, since each answer is scored by itself. ``completions`` are texts where the
            prompt is one, else lists of one message. ``columns`` are the row's, as lists of one.
            None says nothing about the row. ``log_metric(name, value)`` is there if it is taken.
    verl    f(data_source, solution_str, ground_truth, extra_info) -> float, or {"score": ...}
            Other numbers of the dict become metrics.

Either may be ``async def``. Neither is given token ids, the trainer's state or other answers of the
group. The text is the answer without thinking and tool calls; a message has ``reasoning_content``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.config.plugins import PluginGroup
from libra_cli.envs.dataset.rows import Prompt, shown, truth_of
from libra_cli.envs.protocol import Task
from libra_cli.plugins.finding import find

REWARDS = PluginGroup(
    "libra.rewards",
    "reward",
    {
        "match": "libra_cli.envs.dataset.match:match",
        "math": "libra_cli.envs.dataset.mathematics:math",
    },
    error=EnvironmentBroken,
)


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """An answer to a row, with all that a reward may look at."""

    task: Task
    prompt: Prompt
    text: str
    reasoning: str
    truth_column: str | None


@dataclass(frozen=True, slots=True)
class Graded:
    """The reward of an answer; None if it says nothing about the row."""

    value: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


RewardFunction: TypeAlias = Callable[[ModelAnswer], Graded | Awaitable[Graded]]


def reward_function(name: str) -> RewardFunction:
    """Find a reward, and adapt it to be called with an answer.

    Raises:
        EnvironmentBroken: there is none of this name, or it has no signature that is known.
    """
    function = find(REWARDS, name)
    parameters = _parameters(function)
    if "solution_str" in parameters:
        call, read = _verl_arguments, _verl_result
    elif "completions" in parameters:
        call, read = _trl_arguments, _trl_result
    else:
        raise EnvironmentBroken(
            f"reward {name!r} takes ({', '.join(parameters)}), neither completions nor "
            "solution_str",
            hint="def f(prompts, completions, **columns) -> list[float], or "
            "def f(data_source, solution_str, ground_truth, extra_info) -> float",
        )

    def grade(answered: ModelAnswer) -> Graded | Awaitable[Graded]:
        metrics: dict[str, float] = {}
        arguments = _taken(name, parameters, call(answered, metrics), answered.task)
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            return _awaited(name, returned, read, metrics)
        return _graded(name, returned, read, metrics)

    return grade


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}  # it cannot be called, or is written in C


async def _awaited(
    name: str, returned: Awaitable[Any], read: Callable[..., Any], metrics: dict[str, float]
) -> Graded:
    return _graded(name, await returned, read, metrics)


def _graded(
    name: str, returned: Any, read: Callable[..., Any], metrics: dict[str, float]
) -> Graded:
    try:
        value = read(returned, metrics)
        return Graded(None if value is None else float(value), metrics)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise EnvironmentBroken(f"reward {name!r} returned {returned!r}: {error}") from error


def _taken(
    name: str, parameters: Mapping[str, inspect.Parameter], given: dict[str, Any], task: Task
) -> dict[str, Any]:
    """Return those of ``given`` that the function has parameters for: all, if it has ``**kwargs``.

    Raises:
        EnvironmentBroken: a parameter without a default is in none of ``given``.
    """
    lacking = [
        one.name
        for one in parameters.values()
        if one.default is one.empty
        and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and one.name not in given
    ]
    if lacking:
        raise EnvironmentBroken(
            f"reward {name!r} takes {', '.join(lacking)}, of which the row has nothing: "
            f"{shown(task)}"
        )
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return given
    return {key: value for key, value in given.items() if key in parameters}


def _verl_arguments(answered: ModelAnswer, metrics: dict[str, float]) -> dict[str, Any]:
    return {
        "data_source": answered.task.get("data_source", ""),
        "solution_str": answered.text,
        "ground_truth": truth_of(answered.task, answered.truth_column),
        "extra_info": answered.task.get("extra_info"),
    }


def _verl_result(returned: Any, metrics: dict[str, float]) -> Any:
    if not isinstance(returned, Mapping):
        return returned
    metrics.update(
        (str(name), float(value))
        for name, value in returned.items()
        if name != "score" and isinstance(value, int | float)
    )
    return returned["score"]


def _trl_arguments(answered: ModelAnswer, metrics: dict[str, float]) -> dict[str, Any]:
    columns = {
        name: [value]
        for name, value in answered.task.items()
        if name not in ("prompt", "completion")
    }
    message = {"role": "assistant", "content": answered.text}
    if answered.reasoning:
        message["reasoning_content"] = answered.reasoning
    plain = isinstance(answered.prompt, str)
    return columns | {
        "prompts": [answered.prompt],
        "completions": [answered.text if plain else [message]],
        "log_metric": lambda name, value: metrics.update({str(name): float(value)}),
    }


def _trl_result(returned: Any, metrics: dict[str, float]) -> Any:
    if not isinstance(returned, Sequence) and not hasattr(returned, "tolist"):
        raise TypeError("a list with one reward was expected")
    if len(returned) != 1:
        raise ValueError(f"it was given 1 completion and returned {len(returned)} rewards")
    return returned[0]
