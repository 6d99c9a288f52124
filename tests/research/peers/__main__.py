"""libra and TRL's GRPOTrainer for real, one after the other: leave the machine to them.

python -m tests.research.peers recipes/quickstart.yaml --steps 40 --seeds 3
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra_cli.cli.reports import Json, show_report, working
from libra_cli.cli.terminal import errors_told
from libra_cli.config.errors import LibraError
from tests.research.peers.report import peers_report
from tests.research.peers.runs import peers

RecipePath = Annotated[Path, typer.Argument(help="One that plays pointer-chase here.")]
Latencies = Annotated[
    str, typer.Option(help="Seconds that a tool call takes, separated by commas.")
]
Steps = Annotated[int, typer.Option(min=5, help="Optimizer steps of a run.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each.")]
FirstSeed = Annotated[int, typer.Option(min=0, help="The seed of the first run.")]
Contenders = Annotated[str, typer.Option(help="Who runs, separated by commas.")]


def main(
    recipe: RecipePath,
    latencies: Latencies = "0",
    steps: Steps = 40,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    contenders: Contenders = "libra,trl",
    json_file: Json = None,
) -> None:
    """Run the recipe by libra and by TRL's GRPOTrainer with its own tool loop."""
    with errors_told():
        try:
            waits = [float(text) for text in latencies.split(",")]
        except ValueError as error:
            raise LibraError(
                f"--latencies: {latencies!r} is no list of seconds", hint="--latencies 0,0.02"
            ) from error
        with working() as progress:
            found = peers(
                recipe,
                latencies=waits,
                seeds=range(first_seed, first_seed + seeds),
                steps=steps,
                contenders=contenders.split(","),
                progress=progress,
            )
        show_report(peers_report(found), json_file)


if __name__ == "__main__":
    typer.run(main)
