from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.dataset import TaskFilter, read_tasks
from libra_cli.envs.terminal_tasks.families import FAMILIES, make_tasks
from libra_cli.envs.terminal_tasks.human_eval import task_of
from libra_cli.envs.terminal_tasks.programs import PROGRAMS, Program

SHIPPED = Path(__file__).parents[3] / "recipes/tasks/terminal"


def test_every_made_task_can_be_read(tmp_path: Path) -> None:
    made = make_tasks(tmp_path / "tasks", 2 * len(FAMILIES), seed=0)
    found = read_tasks(tmp_path / "tasks", TaskFilter(), network=False, unplayable="error")
    assert sorted(found.playable) == sorted(made)
    notes = [note for task in found.playable.values() for note in task.notes]
    assert {note.partition(": ")[2] for note in notes} == {"cpus does nothing here"}


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_a_seed_makes_the_same_tasks_again_and_another_one_others(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        make_tasks(tmp_path / name, len(FAMILIES), seed)
    assert contents(tmp_path / "one") == contents(tmp_path / "again")
    one, other = contents(tmp_path / "one"), contents(tmp_path / "other")
    differs = {path.partition("/")[0] for path in one if other.get(path) != one[path]}
    assert differs == {f"{family}-000" for family in FAMILIES}


def test_the_shipped_tasks_are_what_is_made(tmp_path: Path) -> None:
    make_tasks(tmp_path, len(FAMILIES), seed=0)
    shipped = contents(SHIPPED)
    names = {path.partition("/")[0] for path in shipped}
    assert names == {"git-000", "log-counts-000", "script-000"}
    made = contents(tmp_path)
    assert shipped == {path: made[path] for path in made if path.partition("/")[0] in names}


def test_tasks_of_a_family_are_of_several_kinds() -> None:
    said = {
        family: len({make(Random(0), number).instruction for number in range(4)})
        for family, make in FAMILIES.items()
    }
    assert {family for family, kinds in said.items() if kinds == 1} == {"encodings"}


def test_a_task_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    make_tasks(tmp_path, 1, seed=0)
    with pytest.raises(EnvironmentBroken, match="rename-000 cannot be made: File exists"):
        make_tasks(tmp_path, 1, seed=0)


def returned(source: str, program: Program, given: tuple[object, ...]) -> object:
    names: dict[str, object] = {}
    exec(source, names)  # the shipped programs, which tasks hold as text
    function = names[program.name]
    assert callable(function)
    try:
        return function(*given)
    except (ValueError, IndexError, TypeError) as error:
        return type(error)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_broken_program_differs_from_the_right_one(program: Program) -> None:
    rng = Random(0)
    assert program.body.count(program.right) >= 1
    cases = [eval(program.case, {"rng": rng}) for _ in range(200)]
    differs = [
        returned(program.solved, program, one) != returned(program.broken, program, one)
        for one in cases
    ]
    assert 0 < sum(differs) < len(differs)


def test_a_problem_of_human_eval_is_a_task() -> None:
    task = task_of(
        {
            "prompt": 'def one():\n    """Return 1."""\n',
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
            "entry_point": "one",
        }
    )
    assert task.files == {"solution.py": 'def one():\n    """Return 1."""\n'}
    assert "    return 1\nEND_OF_SOLUTION" in task.solve
    assert 'check(getattr(module, EXPECTED["name"]))' in task.check
