"""Opens HTTP sessions to servers on hosts, with the run's token."""

from __future__ import annotations

import aiohttp

from libra_cli.runtime.hosts.transport import Endpoint

HOST = "http://localhost"
"""For the header of this name: where a request goes is the socket's matter."""
KEEP_ALIVE_S = 2.0
"""How long an idle connection is kept: less than any server of ours keeps one (``node.http``:
120 s), or a request could meet a connection that is just being closed."""


def open_session(endpoint: Endpoint, token: str) -> aiohttp.ClientSession:
    """Return a session whose relative URLs go to ``endpoint``, with the token on every request."""
    connector = aiohttp.UnixConnector(endpoint.path, limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(
        HOST, connector=connector, headers={"Authorization": f"Bearer {token}"}
    )


def describe(error: BaseException) -> str:
    """Return an error's message, or its type's name if it has none."""
    return str(error) or type(error).__name__
