"""``libra quickstart``: a first run on this machine, with nothing to write before it."""

from __future__ import annotations

from typing import Annotated

import typer

from libra_cli.cli.run import run_here
from libra_cli.cli.terminal import errors_told, out


def quickstart(
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Leave a GPU alone that this machine has.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; the recipe's 40 if left out.")
    ] = None,
) -> None:
    """Train a small agent for real on this machine's GPU or CPU, in a few minutes."""
    from libra_cli.app.dry_run import plan_of
    from libra_cli.app.quickstart import choose
    from libra_cli.runtime.store.run_directory import new_run_dir

    with errors_told():
        chosen = choose(on_cpu=cpu)
        loaded, _ = plan_of(chosen.recipe)
        if steps is not None:
            spec = loaded.run.model_copy(update={"steps": steps})
            loaded = loaded.model_copy(update={"run": spec})
        with new_run_dir(loaded.run) as run_dir:
            for line in (
                f"recipe: {chosen.recipe} ({chosen.why})",
                f"run directory: {run_dir.absolute()}",
            ):
                out.print(line, markup=False, highlight=False, soft_wrap=True)
            run_here(loaded, chosen.recipe, run_dir, resume=False)
    following = {
        f"libra show {run_dir} --best": "what the agent did, turn by turn",
        f"libra serve {run_dir}": "its curves in a browser; libra status has figures",
        "libra init": "a recipe of your own; libra help start says how",
    }
    width = max(map(len, following))
    for command, what in following.items():
        line = f"next: {command:<{width}}  {what}"
        out.print(line, markup=False, highlight=False, soft_wrap=True)
