"""An HTTP server of this process on a port of loopback, which only this machine reaches."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from libra_cli.config.errors import StateError

LOOPBACK = "127.0.0.1"


class LoopbackServer:
    """An application that is served from ``start`` to ``close``."""

    def __init__(self, app: web.Application, **settings: Any) -> None:
        """Serve an application; ``settings`` are those of aiohttp's ``AppRunner``."""
        self._runner = web.AppRunner(app, access_log=None, **settings)
        self.port = 0
        """The port, once it listens."""

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def start(self, port: int = 0) -> None:
        """Listen on a port, 0 for any free one.

        Raises:
            StateError: the port is taken.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, LOOPBACK, port).start()
        except OSError as error:
            await self.close()
            hint = "name another with --port, or leave it out for any free one"
            raise StateError(f"port {port} cannot be had: {error}", hint=hint) from error
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """End all connections, and listen no more."""
        await self._runner.cleanup()
