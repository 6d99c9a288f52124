"""Tasks about Python: a function to mend, or to write, and hidden tests of it."""

from __future__ import annotations

from random import Random

from libra_cli.envs.terminal_tasks.made_task import MadeTask
from libra_cli.envs.terminal_tasks.programs import PROGRAMS, Program

_CASES = 200
_CHECK = """\
import copy, importlib.util, random

def loaded(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, EXPECTED["name"])

mine, theirs = loaded("/tests/reference.py"), loaded(APP / EXPECTED["file"])
rng = random.Random(EXPECTED["seed"])
for _ in range({cases}):
    given = {case}
    right = mine(*copy.deepcopy(given))
    found = theirs(*copy.deepcopy(given))
    assert found == right and type(found) is type(right), (given, found, right)
"""


def mend(rng: Random, number: int) -> MadeTask:
    """A function does not do what its docstring says."""
    program = PROGRAMS[number % len(PROGRAMS)]
    return _task(
        program,
        f"The function `{program.name}` in `/app/{program.name}.py` does not always do what its "
        "docstring says. Find out where, and mend it.",
        program.broken,
        rng,
    )


def write(rng: Random, number: int) -> MadeTask:
    """A function has its docstring alone."""
    program = PROGRAMS[(number + len(PROGRAMS) // 2) % len(PROGRAMS)]
    return _task(
        program,
        f"Write the function `{program.name}` in `/app/{program.name}.py`, which so far has only "
        "its docstring. Use nothing but Python's standard library.",
        program.empty,
        rng,
    )


def _task(program: Program, instruction: str, begin: str, rng: Random) -> MadeTask:
    file = f"{program.name}.py"
    return MadeTask(
        instruction,
        {file: begin},
        f"cat > {file} <<'END'\n{program.solved}END",
        _CHECK.format(cases=_CASES, case=program.case),
        {"name": program.name, "file": file, "seed": rng.randrange(10**6)},
        category="code",
        difficulty="medium",
        hidden={"reference.py": program.solved},
    )
