"""The simulator beside the recorded requests of a real server.

python -m tests.research.fidelity --run requests.jsonl [--profile NAME | --layers DIRECTORY]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra_cli.cli.reports import Json, ProfileName, show_report, working
from libra_cli.cli.terminal import errors_told
from tests.research.fidelity.report import server_report
from tests.research.fidelity.server import compare_server

Run = Annotated[
    Path, typer.Option("--run", help="A recorded run of a real server: its requests, JSON lines.")
]
Meta = Annotated[Path | None, typer.Option("--meta", help="Its meta.json, if it is not beside it.")]
Layers = Annotated[
    Path | None,
    typer.Option("--layers", help="Per-layer measurements of that GPU, instead of a profile."),
]
Gpu = Annotated[
    str, typer.Option("--gpu", help="Its name there; else the run's file name says it.")
]
Links = Annotated[
    str,
    typer.Option(
        "--interconnect",
        help="Between the GPUs of a server, with --layers: pcie, pcie-peer (ACS, IOMMU off) "
        "or nvlink.",
    ),
]


def main(
    run: Run,
    meta: Meta = None,
    profile: ProfileName = "",
    layers: Layers = None,
    gpu: Gpu = "",
    interconnect: Links = "pcie",
    json_file: Json = None,
) -> None:
    """The simulator beside the recorded requests of a real server."""
    with errors_told():
        with working():
            compared = compare_server(
                run,
                meta,
                profile=profile or "a800-qwen3-14b",
                layers=layers,
                gpu=gpu,
                interconnect=interconnect,
            )
        show_report(server_report(compared), json_file)


if __name__ == "__main__":
    typer.run(main)
