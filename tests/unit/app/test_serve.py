"""The report in a browser: who is let in, and what is shown while the run goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from libra_cli.app.serve import ReportServer
from libra_cli.config.errors import StateError
from tests.sample_run import write


def visit(run_dir: Path, look: Callable[[ReportServer, str], Awaitable[None]]) -> None:
    """Serve a run while ``look`` asks for it."""

    async def go() -> None:
        server = ReportServer(write(run_dir))
        url = await server.start(0)
        try:
            await look(server, url)
        finally:
            await server.close()

    asyncio.run(go())


def test_the_address_that_is_printed_opens_the_report(tmp_path: Path):
    async def look(server: ReportServer, url: str) -> None:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            async with browser.get(url) as answer:
                page = await answer.text()
            assert answer.status == 200
            assert "token" not in str(answer.url), "the token would stay in the history"
            assert "quickstart-1" in page
            assert '<script src="live.js">' in page
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            async with browser.get(answer.url.with_path("/status.json")) as status:
                assert json.loads(await status.text())["run"]["id"] == "quickstart-1"

    visit(tmp_path / "quickstart-1", look)


@pytest.mark.parametrize("path", ["/", "/status.json", "/live.js", "/?token=guessed", "/?token="])
def test_nobody_without_the_token_is_let_in(path, tmp_path):
    async def look(server: ReportServer, url: str) -> None:
        base = url.partition("/?")[0]
        async with aiohttp.ClientSession() as stranger, stranger.get(base + path) as answer:
            assert answer.status == 401
            assert "quickstart-1" not in await answer.text()

    visit(tmp_path / "quickstart-1", look)


def test_a_page_of_another_host_does_not_reach_it(tmp_path):
    async def look(server: ReportServer, url: str) -> None:
        headers = {"Host": "evil.example", "Cookie": f"libra={server.token}"}
        async with aiohttp.ClientSession() as page, page.get(url, headers=headers) as answer:
            assert answer.status == 403

    visit(tmp_path / "quickstart-1", look)


def test_a_port_that_is_taken_is_told(tmp_path):
    async def look(server: ReportServer, url: str) -> None:
        port = int(url.split(":")[2].partition("/")[0])
        with pytest.raises(StateError, match=f"port {port} cannot be had") as told:
            await ReportServer(server.run_dir).start(port)
        assert "--port" in (told.value.hint or "")

    visit(tmp_path / "quickstart-1", look)


def test_a_run_that_is_not_there_is_told(tmp_path):
    with pytest.raises(StateError):
        ReportServer(tmp_path / "none")


def test_two_runs_are_shown_in_one_browser(tmp_path):
    async def look(server: ReportServer, url: str) -> None:
        second = ReportServer(server.run_dir)
        other = await second.start(0)
        jar = aiohttp.CookieJar(unsafe=True)
        try:
            async with aiohttp.ClientSession(cookie_jar=jar, raise_for_status=True) as browser:
                for opened in (url, other, url.partition("?")[0], other.partition("?")[0]):
                    async with browser.get(opened) as answer:
                        assert "quickstart-1" in await answer.text()
        finally:
            await second.close()

    visit(tmp_path / "quickstart-1", look)
