"""Gives the files of one checkpoint to the other hosts of its run. Standard library only.

    python -m libra_cli.node.checkpoints.server DIRECTORY BIND FIRST_PORT LAST_PORT

The first line of standard input is the JSON of ``Credentials``: it answers hosts of the run alone
(mutual TLS), whose requests carry the token. The answer is the only line of standard output,
``{"port": 21999}``, or 0 if there is no complete checkpoint, or a damaged one; then this process
ends at once, and otherwise at the end of its input, so it cannot outlive whoever asked.

    GET /<file>    the file, or those of its bytes that a header ``Range: bytes=FIRST-LAST`` names
"""

from __future__ import annotations

import json
import re
import sys
from http import HTTPStatus
from pathlib import Path

from libra_cli.node.checkpoints.contents import COMPLETE
from libra_cli.node.checkpoints.verify import verified
from libra_cli.node.credentials import Credentials
from libra_cli.node.http import BearerHandler, HostServer, send_file, serve_hosts

NAME = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9._-]*")
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class CheckpointHandler(BearerHandler):
    """Answers ``GET /<file>`` for plain files of one directory."""

    root: Path

    def do_GET(self) -> None:  # noqa: N802  http.server calls it
        """Send the file, or a part of it."""
        name = self.path.removeprefix("/")
        path = self.root / name
        if not self.is_trusted():
            self._refuse(HTTPStatus.UNAUTHORIZED)
        elif not NAME.fullmatch(name) or path.is_symlink() or not path.is_file():
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._send(path)

    def _send(self, path: Path) -> None:
        size = path.stat().st_size
        asked = RANGE.fullmatch(self.headers.get("Range", ""))
        first, last = (int(asked[1]), int(asked[2])) if asked else (0, size - 1)
        if asked and not first <= last < size:
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        count = last - first + 1
        self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
        self.send_header("Content-Length", str(count))
        self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()
        self.wfile.flush()
        if count:
            with path.open("rb") as file:
                send_file(self.connection, file, first, count)

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def serve(root: Path, bind: str, ports: range, credentials: Credentials) -> HostServer:
    """Serve a directory on a free port, the last first: the first ones wait for a run's processes.

    Raises:
        OSError: none of them is free.
    """
    for port in reversed(ports):
        try:
            return serve_hosts(
                CheckpointHandler, bind=bind, port=port, credentials=credentials, root=root
            )
        except OSError:
            continue
    raise OSError(f"no port from {ports[0]} to {ports[-1]} is free at {bind}")


def main() -> int:
    """Serve the files until the end of standard input; returns the exit status."""
    root, bind, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    credentials = Credentials(**json.loads(sys.stdin.readline()))
    if not (root / COMPLETE).is_file() or verified(root)["damaged"]:
        sys.stdout.write(json.dumps({"port": 0}) + "\n")
        return 0
    server = serve(root, bind, range(first, last + 1), credentials)
    sys.stdout.write(json.dumps({"port": server.server_address[1]}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
