"""Finds environments by name, makes them, and reads their tasks.

A name is an entry point of group ``libra.environments`` (with which a package adds one), the name
of one that ships with libra, or an import path ``package.module:attribute``. Every failure is an
``EnvironmentBroken`` that names what exists and what was probably meant.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.protocol import Environment, Task

GROUP = "libra.environments"
SHIPPED: Mapping[str, str] = {
    "calculator": "libra_cli.envs.calculator:Calculator",
    "pointer-chase": "libra_cli.envs.pointer_chase:PointerChase",
}
"""The entry points of ``pyproject.toml`` (a test compares them), for a checkout that is only on
PYTHONPATH and so has none."""
_MEMBERS = ("tools", "task", "reset", "step", "score")


class Factory(Protocol):
    """Makes the environment of one trajectory."""

    def __call__(self, **arguments: Any) -> Environment:
        """Make one from ``environment.args``, and ``secrets`` if the recipe has any."""


def available() -> dict[str, str]:
    """Return every name that can be used, with its import path."""
    installed = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    return dict(sorted({**SHIPPED, **installed}.items()))


def find(name: str) -> Factory:
    """Import the factory of an environment.

    Raises:
        EnvironmentBroken: there is none of this name, or it cannot be imported.
    """
    known = available()
    target = name if ":" in name else known.get(name)
    if target is None:
        raise _unknown(name, list(known))
    module = target.partition(":")[0]
    try:
        factory = EntryPoint(name, target, GROUP).load()
    except AttributeError as error:
        raise _no_attribute(name, target, error) from error
    except Exception as error:  # a module of somebody else may raise anything while it is imported
        raise EnvironmentBroken(
            f"environment {name!r}: importing {module} failed: {type(error).__name__}: {error}",
            hint=f'python -c "import {module}"',
        ) from error
    if not callable(factory):
        raise EnvironmentBroken(f"environment {name!r}: {target} is not callable")
    return factory  # type: ignore[no-any-return]


def make(name: str, factory: Factory, arguments: Mapping[str, Any]) -> Environment:
    """Make one environment.

    Raises:
        EnvironmentBroken: the arguments do not fit, or it lacks a member of the protocol.
    """
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise EnvironmentBroken(
            f"environment {name!r} was given {sorted(arguments)}: {error}",
            hint=f"it takes: {inspect.signature(factory)}",
        ) from error
    except ValueError:
        pass  # some callables have no signature; then the call itself shows what is wrong
    environment = factory(**arguments)
    missing = [member for member in _MEMBERS if not hasattr(environment, member)]
    if missing:
        raise EnvironmentBroken(
            f"environment {name!r} has no {', '.join(missing)}",
            hint="see libra_cli/envs/protocol.py for what an environment is",
        )
    return environment


def load_tasks(path: Path) -> Sequence[Task]:
    """Read the tasks of a JSONL file, one object a line; empty lines are skipped.

    Raises:
        EnvironmentBroken: the file cannot be read, is malformed, or has no task.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentBroken(f"{path}: the tasks file cannot be read: {error}") from error
    tasks = [_task(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise EnvironmentBroken(f"{path}: the tasks file holds no task")
    return tasks


def _task(path: Path, number: int, line: str) -> Task:
    try:
        task = json.loads(line)
    except ValueError as error:
        raise EnvironmentBroken(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(task, dict):
        raise EnvironmentBroken(f"{path}:{number}: a task is a JSON object")
    return task


def _unknown(name: str, known: list[str]) -> EnvironmentBroken:
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return EnvironmentBroken(
        f"there is no environment {name!r}{meant}",
        hint=f"available: {', '.join(known)}; or an import path such as my_package.my_module:MyEnv",
    )


def _no_attribute(name: str, target: str, error: AttributeError) -> EnvironmentBroken:
    module, _, attribute = target.partition(":")
    try:
        names = [n for n in dir(importlib.import_module(module)) if not n.startswith("_")]
    except Exception:  # noqa: BLE001  the import itself raised the AttributeError
        return EnvironmentBroken(f"environment {name!r}: importing {module} failed: {error}")
    close = difflib.get_close_matches(attribute, names, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return EnvironmentBroken(
        f"environment {name!r}: {module} has no {attribute!r}{meant}",
        hint=f"{module} has: {', '.join(names)}",
    )
