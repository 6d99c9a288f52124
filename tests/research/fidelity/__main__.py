"""The simulator beside what was recorded: a server's requests, or whole runs of libra's.

python -m tests.research.fidelity --run requests.jsonl [--profile NAME | --layers DIRECTORY]
python -m tests.research.fidelity --run-dir RUN_DIR --profile FILE
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra_cli.bench.report.sheets import Report
from libra_cli.cli.reports import Json, ProfileName, show_report, working
from libra_cli.cli.terminal import errors_told
from libra_cli.sim.profiles import load_profile
from tests.research.fidelity.report import runs_report, server_report
from tests.research.fidelity.run import compare_runs
from tests.research.fidelity.server import compare_server

Run = Annotated[
    Path | None,
    typer.Option("--run", help="A recorded run of a real server: its requests, JSON lines."),
]
RunDirs = Annotated[
    list[Path] | None,
    typer.Option("--run-dir", help="A finished run of libra's; more than one may be given."),
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
    run: Run = None,
    run_dirs: RunDirs = None,
    meta: Meta = None,
    profile: ProfileName = "",
    layers: Layers = None,
    gpu: Gpu = "",
    interconnect: Links = "pcie",
    json_file: Json = None,
) -> None:
    """The simulator beside what was recorded: a server's requests, or whole runs of libra's."""
    if (run is None) == (not run_dirs):
        raise typer.BadParameter("give either --run or --run-dir")
    if run_dirs and not profile:
        raise typer.BadParameter("--run-dir needs --profile, of the hosts the run was on")
    with errors_told():
        if run is None:
            report = _runs(run_dirs or [], profile)
        else:
            with working():
                compared = compare_server(
                    run,
                    meta,
                    profile=profile or "a800-qwen3-14b",
                    layers=layers,
                    gpu=gpu,
                    interconnect=interconnect,
                )
            report = server_report(compared)
        show_report(report, json_file)


def _runs(run_dirs: list[Path], profile: str) -> Report:
    prices = load_profile(profile)
    with working() as progress:
        found = compare_runs(run_dirs, prices, progress=progress)
    return runs_report(found, prices)


if __name__ == "__main__":
    typer.run(main)
