"""``libra tasks``: makes tasks for a terminal, and checks that tasks can be solved and are not yet.

A task is sound if its reference solution gets 1.0 (the oracle), and an agent that does nothing gets
0.0 (the no-op). Each is played in a sandbox of its own, without a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken, InputError, LibraError, RecipeError
from libra_cli.envs import registry
from libra_cli.envs.harbor.environment import Harbor
from libra_cli.runtime.episodes.places import sandbox_of
from libra_cli.runtime.recipes.loader import load_recipe

SOLVED = 1.0
"""The reward of a reference solution; that of doing nothing is 0."""


@dataclass(frozen=True, slots=True)
class CheckedTask:
    """What a task gave to its solution and to nobody, and how long that took."""

    name: str
    oracle: float | None
    """The reward of the reference solution; None if it could not be played."""
    noop: float | None
    said: str
    """Why it is not sound, as its tests or its image say; empty if it is."""
    longest_s: float
    """Seconds of the longest call, a reset or a score, which tool_timeout_s must allow."""

    @property
    def sound(self) -> bool:
        return self.oracle == SOLVED and self.noop == 0.0


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Which tasks are to be checked, and how each is made."""

    names: Sequence[str]
    refused: Mapping[str, str]
    """Why each of the others cannot be played."""
    notes: Sequence[str]
    """What of the task files is left aside."""
    make: Callable[[], Harbor]


def tasks_of(target: Path, base: str | None) -> TaskCheck:
    """Return the tasks of a directory, or of the environments of a recipe that plays tasks.

    Raises:
        InputError: there are none, or they cannot be read.
    """
    spec = _spec_of(target, base)
    make = registry.maker(
        spec.name, {**spec.args, "unplayable": "skip"}, None, sandbox_of(spec) or {}
    )
    environment = make()
    if not isinstance(environment, Harbor):
        raise InputError(f"environment {spec.name!r} is none of Harbor's tasks")
    found = environment.tasks_played
    refused = {name: f"{why.where}: {why.reason}" for name, why in found.refused.items()}
    notes = [note for task in found.playable.values() for note in task.notes]

    def made() -> Harbor:
        one = make()
        assert isinstance(one, Harbor)
        return one

    return TaskCheck(list(found.playable), refused, notes, made)


def _spec_of(target: Path, base: str | None) -> EnvironmentSpec:
    if target.is_dir():
        args: dict[str, Any] = {"tasks": str(target)}
        return EnvironmentSpec(name="harbor", args=args | ({"base": base} if base else {}))
    if not target.exists():
        raise InputError(
            f"{target} is neither a directory of tasks nor a recipe",
            hint=f"libra tasks make {target} makes some there",
        )
    recipe = load_recipe(target)
    for one in recipe.environment:
        if one.name == "harbor":
            return one.model_copy(update={"args": one.args | ({"base": base} if base else {})})
    raise RecipeError(
        f"{target} has no environment harbor", hint="libra tasks check DIRECTORY; libra help harbor"
    )


def check_tasks(checked: TaskCheck, processes: int) -> Iterator[CheckedTask]:
    """Play every task twice, some at the same time, and yield them as they stand in ``names``."""
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(lambda name: _check(name, checked.make), checked.names)


def _check(name: str, make: Callable[[], Harbor]) -> CheckedTask:
    try:
        oracle, why, first = _played(name, make, solved=True)
        noop, told, second = _played(name, make, solved=False)
    except LibraError as error:
        said = f"{error}\nnext: {error.hint}" if error.hint else str(error)
        return CheckedTask(name, None, None, said, 0.0)
    said = why if oracle != SOLVED else f"nothing was done, and yet: {told}" if noop else ""
    return CheckedTask(name, oracle, noop, said, max(first, second))


def _answered(environment: Harbor, *, solved: bool) -> str:
    """Play all steps of a task, or its only one; return why solutions failed, if they did."""
    said = environment.solve() if solved else ""
    while environment.reply("") is not None:
        said += environment.solve() if solved else ""
    return said


def _played(name: str, make: Callable[[], Harbor], *, solved: bool) -> tuple[float, str, float]:
    """Return the reward, what was said on the way, and the seconds of the longest call."""
    environment = make()
    try:
        environment.prepare({"task": name})  # before it is played, as in a run
        began = time.monotonic()
        environment.reset({"task": name}, 0)
        ready = time.monotonic()
        said = _answered(environment, solved=solved)
        scoring = time.monotonic()
        reward = environment.score("")
        longest = max(ready - began, time.monotonic() - scoring)
        return reward, f"{said}\n{environment.said}".strip(), longest
    except OSError as error:
        raise EnvironmentBroken(f"{name}: {error}") from error
    finally:
        environment.close()
