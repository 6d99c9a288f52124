"""A directory of task directories: which of them are played, and in what order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from libra_cli.config.errors import EnvironmentBroken, did_you_mean
from libra_cli.envs.harbor.image import read_image
from libra_cli.envs.harbor.task_file import TASK_FILE, HarborTask, Refusal, read_task

Unplayable = Literal["error", "skip"]
_SHOWN = 5
"""Tasks that an error names, of those that cannot be played."""


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Which tasks of a directory are meant; None means all."""

    names: tuple[str, ...] | None = None
    difficulty: tuple[str, ...] | None = None
    category: tuple[str, ...] | None = None

    def takes(self, task: HarborTask) -> bool:
        """Say whether a task is meant."""
        wanted = (
            (self.names, task.name),
            (self.difficulty, task.metadata.get("difficulty")),
            (self.category, task.metadata.get("category")),
        )
        return all(some is None or value in some for some, value in wanted)


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The tasks of a directory by name, in the order of their names."""

    playable: Mapping[str, HarborTask]
    refused: Mapping[str, Refusal]
    """The first reason for which each of the others is not played."""

    def named(self, name: object) -> HarborTask:
        """Return the task of this name.

        Raises:
            EnvironmentBroken: there is none, or it is not played.
        """
        if isinstance(name, str) and name in self.playable:
            return self.playable[name]
        if isinstance(name, str) and name in self.refused:
            raise _broken({name: self.refused[name]})
        raise EnvironmentBroken(
            f"there is no task {name!r}{did_you_mean(str(name), self.playable)}",
            hint='a row of a tasks file is {"task": NAME}, the name of a task\'s directory',
        )


@lru_cache(maxsize=16)
def read_tasks(
    directory: Path, chosen: TaskFilter, *, network: bool, unplayable: Unplayable
) -> TaskSet:
    """Read the tasks of a directory, or those that lie one level deeper.

    ``network`` says whether the sandbox has one, as some tasks want. Once read they are kept, so a
    run plays what it began with.

    Raises:
        EnvironmentBroken: there are none, a file is wrong, or some cannot be played and
            ``unplayable`` is error.
    """
    found = [read_task(path) for path in _directories(directory)]
    meant = [task for task in found if chosen.takes(task)]
    if not meant:
        raise EnvironmentBroken(
            f"{directory}: none of {len(found)} tasks is meant by {_told(chosen)}"
            if found
            else f"{directory} has no task: no directory in it has a {TASK_FILE}",
            hint="libra tasks make DIR makes some; libra help harbor",
        )
    refused = {task.name: why for task in meant if (why := _refusal(task, network=network))}
    if refused and (unplayable == "error" or len(refused) == len(meant)):
        raise _broken(refused)
    playable = {task.name: task for task in meant if task.name not in refused}
    return TaskSet(playable, refused)


def _directories(directory: Path) -> Sequence[Path]:
    """Directories with a task.toml: the given one, else those in it, else those a level deeper."""
    for pattern in (TASK_FILE, f"*/{TASK_FILE}", f"*/*/{TASK_FILE}"):
        if found := sorted(path.parent for path in directory.glob(pattern)):
            return found
    return ()


def _refusal(task: HarborTask, *, network: bool) -> Refusal | None:
    if task.refused:
        return task.refused[0]
    if task.wants_internet and not network:
        return Refusal(
            str(task.directory / TASK_FILE),
            "it wants the internet, and the sandbox has none",
            "environment.sandbox: {network: true}, for tasks that you trust with your network",
        )
    try:
        read_image(task.environment)
    except EnvironmentBroken as error:
        return Refusal("", str(error), error.hint)
    return None


def _broken(refused: Mapping[str, Refusal]) -> EnvironmentBroken:
    told = [f"{why.where}: {why.reason}".removeprefix(": ") for why in refused.values()]
    more = f"\nand {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    first = next(iter(refused.values()))
    return EnvironmentBroken(
        f"{len(told)} tasks cannot be played:\n" + "\n".join(told[:_SHOWN]) + more,
        hint=f"{first.hint}; or play the others: environment.args: {{unplayable: skip}}",
    )


def _told(chosen: TaskFilter) -> str:
    given = {key: getattr(chosen, key) for key in ("names", "difficulty", "category")}
    return ", ".join(f"{key} {', '.join(some)}" for key, some in given.items() if some is not None)
