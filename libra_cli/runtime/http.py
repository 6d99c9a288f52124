"""One way to open an HTTP session to something on a host: its endpoint and the run's token."""

from __future__ import annotations

import aiohttp

from libra_cli.runtime.hosts.transport import Endpoint

KEEP_ALIVE_S = 2.0
"""Less than any server of ours keeps an idle connection (uvicorn: 5 s), or requests would meet a
connection that is just being closed."""


def open_session(endpoint: Endpoint, token: str) -> aiohttp.ClientSession:
    """A session whose relative URLs go to ``endpoint``, with the bearer token on every request."""
    connector: aiohttp.BaseConnector = (
        aiohttp.UnixConnector(path=endpoint.address, limit=0, keepalive_timeout=KEEP_ALIVE_S)
        if endpoint.kind == "unix"
        else aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    )
    return aiohttp.ClientSession(
        endpoint.url, connector=connector, headers={"Authorization": f"Bearer {token}"}
    )


def describe(error: BaseException) -> str:
    """What went wrong, also for the errors that say nothing of themselves."""
    return str(error) or type(error).__name__
