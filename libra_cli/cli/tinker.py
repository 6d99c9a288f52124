"""``libra tinker``: the HTTP interface of Tinker's SDK on the hosts of a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeGuard

import typer

from libra_cli.cli.terminal import err, errors_told, out

if TYPE_CHECKING:
    from libra_cli.app.tinker import TinkerAddress


def tinker(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Its model, on its hosts: one train slot.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Directory of what clients save.")
    ] = Path("tinker-weights"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of loopback; 0 is any free one.")
    ] = 0,
    max_rank: Annotated[int, typer.Option(min=8, max=512, help="Largest rank of an adapter.")] = 32,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="What clients call the model, Qwen/Qwen3-8B for example."),
    ] = None,
) -> None:
    """Serve training loops that are written for Tinker's SDK, until Ctrl-C."""
    from libra_cli.app import tinker as command

    def ready(address: TinkerAddress) -> None:
        lines = (
            f"export TINKER_BASE_URL={address.url}",
            f"export TINKER_API_KEY={address.key}",
            f"base model: {address.model}",
        )
        for line in lines:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        err.print("Ctrl-C ends it", style="dim")

    with errors_told():
        command.serve(
            recipe,
            output,
            port=port,
            max_rank=max_rank,
            served_model_name=served_model_name,
            ready=ready,
            note=lambda text: err.print(text, markup=False, highlight=False, soft_wrap=True),
        )


def serves_tinker(directory: Path | None) -> TypeGuard[Path]:
    """Whether a directory is that of what clients of ``libra tinker`` save."""
    from libra_cli.runtime.tinker.address import has_service

    return directory is not None and has_service(directory)


def show_service(directory: Path, *, as_json: bool) -> None:
    """Print the clients of a service and their adapters. Raises StateError if it has ended."""
    from libra_cli.report.terminal.tinker import service_view
    from libra_cli.runtime.tinker.address import ask_status

    told = ask_status(directory)
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        out.print(service_view(told))
