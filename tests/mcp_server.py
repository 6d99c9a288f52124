"""An MCP server made with the package ``mcp``: a notebook for each session.

``python -m tests.mcp_server PORT [json]``; with ``json`` it answers without streams of events.
``python -m tests.mcp_server stdio`` speaks over stdin and stdout.
"""

# mypy: disable-error-code="misc, untyped-decorator"
from __future__ import annotations

import os
import sys

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notebook")
NOTES: dict[str, list[str]] = {}


def notes(context: Context) -> list[str]:
    session = context.headers.get("mcp-session-id", "") if context.headers else ""
    return NOTES.setdefault(session, [])


@server.tool()
def write(note: str, context: Context, times: int = 1) -> str:
    """Write a note down."""
    if times < 1:
        raise ToolError("times must be positive")
    notes(context).extend([note] * times)
    return f"{len(notes(context))} notes"


@server.tool()
async def read(context: Context) -> str:
    """Read all notes."""
    await context.info("reading")
    return ", ".join(notes(context)) or "nothing"


@server.tool()
def whoami(context: Context) -> str:
    """Tell the caller's key."""
    return str(context.headers.get("authorization")) if context.headers else os.environ["KEY"]


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run(transport="stdio")
        sys.exit()
    server.run(
        transport="streamable-http",
        host="127.0.0.1",
        port=int(sys.argv[1]),
        json_response="json" in sys.argv,
    )
