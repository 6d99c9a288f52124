"""``libra serve``: the report of a run, live, in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from libra_cli.cli.completion import RunDir
from libra_cli.cli.terminal import errors_told, out


def serve(
    run_dir: RunDir = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of loopback; 0 is any free one.")
    ] = 0,
) -> None:
    """Show a run's report in a browser, drawn again while it goes on, until Ctrl-C."""
    import asyncio

    from libra_cli.app.serve import ReportServer

    async def run() -> None:
        server = ReportServer(run_dir)
        out.print(f"{server.run_dir} is at", markup=False, highlight=False)
        out.print(await server.start(port), markup=False, highlight=False, soft_wrap=True)
        out.print("Ctrl-C ends this, not the run", style="dim")
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()

    with errors_told():
        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            return
