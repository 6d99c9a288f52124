"""``libra serve``: the report of a run in a browser, drawn again while the run goes on.

It listens on loopback only. The address that is printed holds a token: the browser is given it as
a cookie and sent to the address without it, so that it is in no history and no referrer. Whoever
has neither is refused, and so is a request that names another host, which is how a page of
somebody else's reaches a server on loopback (DNS rebinding).

The page is ``report.html`` with a script that fetches it again; it is drawn at most every
``REDRAW_S`` seconds, in a thread, and only while somebody looks.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from pathlib import Path

from aiohttp import web

from libra_cli.config.errors import LibraError
from libra_cli.report.html.run_report import report_page
from libra_cli.report.html.templates import template
from libra_cli.report.status.summary import status_of, to_json
from libra_cli.runtime.processes.loopback import LoopbackServer
from libra_cli.runtime.store.run_directory import newest_run

REDRAW_S = 5.0
_SAFE = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'self'; connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ReportServer:
    """Serves the report and the status of one run over HTTP, for ``libra serve``."""

    def __init__(self, run_dir: Path | None) -> None:
        """Find the run; the newest one if none is named.

        Raises:
            StateError: there is no such run.
        """
        self.run_dir = run_dir or newest_run()
        status_of(self.run_dir)
        self.token = secrets.token_urlsafe(24)
        self._page = ""
        self._drawn_at = float("-inf")
        self._drawing = asyncio.Lock()
        self._hosts: set[str] = set()
        self._cookie = ""
        """The cookie's name, of which a browser has one for all ports of a host."""
        self._server: LoopbackServer | None = None

    async def start(self, port: int) -> str:
        """Listen on a port of loopback, 0 for any free one, and return the address to open.

        Raises:
            StateError: the port is taken.
        """
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._report)
        app.router.add_get("/live.js", self._script)
        app.router.add_get("/status.json", self._status)
        server = self._server = LoopbackServer(app)
        await server.start(port)
        self._cookie = f"libra-{server.port}"
        self._hosts = {server.address, f"localhost:{server.port}"}
        return f"{server.url}/?token={self.token}"

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.headers.get("Host", "") not in self._hosts:
            return web.Response(status=403, text="not the address that libra serve has printed\n")
        given = request.query.get("token")
        if given is not None and compare_digest(given.encode(), self.token.encode()):
            moved = web.HTTPSeeOther(request.path)
            moved.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict")
            raise moved
        known = request.cookies.get(self._cookie, "")
        if not compare_digest(known.encode(), self.token.encode()):
            return web.Response(status=401, text="open the address that libra serve has printed\n")
        answer = await handler(request)
        answer.headers.update(_SAFE)
        return answer

    async def _report(self, request: web.Request) -> web.Response:
        async with self._drawing:
            if time.monotonic() - self._drawn_at >= REDRAW_S:
                try:
                    self._page = await asyncio.to_thread(self._draw)
                except LibraError as error:
                    return web.Response(status=503, text=f"{error}\n")
                self._drawn_at = time.monotonic()
        return web.Response(text=self._page, content_type="text/html")

    def _draw(self) -> str:
        return report_page(self.run_dir, now=time.time(), script="live.js")

    async def _script(self, request: web.Request) -> web.Response:
        return web.Response(text=template("live.js"), content_type="text/javascript")

    async def _status(self, request: web.Request) -> web.Response:
        told = await asyncio.to_thread(status_of, self.run_dir)
        return web.json_response(text=to_json(told))
