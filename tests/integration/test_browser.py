"""The live report in a real browser. Skipped where there is no Chromium."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from libra_cli.app import serve
from libra_cli.report.html.run_report import report_page
from libra_cli.runtime.store.journal import Journal
from tests.sample_run import step_record, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
SHOWN_S = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--virtual-time-budget=8000",  # past the first time that the script draws it again
    "--dump-dom",
)

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium on this machine")


def test_a_page_that_is_open_shows_the_steps_that_come(tmp_path: Path, monkeypatch):
    run_dir, drawn = write(tmp_path / "quickstart-1", steps=12), list[str]()

    def draw_then_train(*args: Any, **more: Any) -> str:
        drawn.append(report_page(*args, **more))
        if len(drawn) == 1:
            with Journal(run_dir) as journal:
                journal.save(step_record(13, 1_790_000_900.0))
        return drawn[-1]

    monkeypatch.setattr(serve, "report_page", draw_then_train)
    monkeypatch.setattr(serve, "REDRAW_S", 0.0)

    async def go() -> tuple[str, str]:
        server = serve.ReportServer(run_dir)
        shown = await _in_browser(await server.start(0), tmp_path)
        await server.close()
        return shown, server.token

    shown, token = asyncio.run(go())
    assert ">13</td>" not in drawn[0]
    assert ">13</td>" in shown, "the step that came while the page was open"
    assert "live, drawn at" in shown
    assert token not in shown


async def _in_browser(url: str, directory: Path) -> str:
    """The document as it stands when the script has drawn it again."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={directory}/profile",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"HOME": str(directory), "PATH": "/usr/bin:/bin"},
    )
    out, _ = await asyncio.wait_for(process.communicate(), SHOWN_S)
    return out.decode()
