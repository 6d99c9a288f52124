"""What a host answers to others that want its weight versions.

    GET /<version>/<file>       a plain file of a version; with a Range, a part of it, which may be
                                one that has come of a version still on its way here
    GET /<version>/.chunks      {file: a digit for every chunk}, which are here or on their way

Nothing else is served, and nothing to whoever lacks a certificate of the run or its token. Standard
library only.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, ClassVar

from libra_cli.node.http import BearerHandler, send_file
from libra_cli.node.weights.chunks import MANIFEST, NAME, chunks_of
from libra_cli.node.weights.download import STATES
from libra_cli.node.weights.draft import HERE, Draft

RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class WeightHandler(BearerHandler):
    """Answers both routes for the versions in ``root`` and those on their way, ``drafts``."""

    timeout: ClassVar[float | None] = 60.0
    root: Path
    drafts: Mapping[str, Draft]

    def do_GET(self) -> None:  # noqa: N802
        """Answer one of the two routes, or 401 or 404; ``http.server`` calls this by its name."""
        version, _, file = self.path.removeprefix("/").partition("/")
        if not self.is_trusted():
            self._send_status(HTTPStatus.UNAUTHORIZED)
        elif not NAME.fullmatch(version):
            self._send_status(HTTPStatus.NOT_FOUND)
        elif file == STATES:
            self._send_states(version)
        elif not NAME.fullmatch(file):
            self._send_status(HTTPStatus.NOT_FOUND)
        else:
            self._send_file(version, file)

    def _send_states(self, version: str) -> None:
        body = json.dumps(self._states(version)).encode()
        self._send_head(HTTPStatus.OK, len(body))
        self.wfile.write(body)

    def _states(self, version: str) -> dict[str, str]:
        directory, draft = self.root / version, self.drafts.get(version)
        if directory.is_dir():
            files = [one for one in os.scandir(directory) if one.is_file(follow_symlinks=False)]
            return {one.name: chr(HERE) * chunks_of(one.stat().st_size) for one in files}
        return draft.states() if draft is not None else {}

    def _send_file(self, version: str, file: str) -> None:
        part, draft = RANGE.fullmatch(self.headers.get("Range", "")), self.drafts.get(version)
        try:
            opened = _open(self.root / version, file)
            if (
                opened is None
                and draft is not None
                and (file == MANIFEST or (part and draft.holds(file, *_span(part))))
            ):
                opened = _open(draft.directory, file)
        except OSError:  # removed, or complete and renamed since
            opened = None
        if opened is None:
            self._send_status(HTTPStatus.NOT_FOUND)
        else:
            self._send(opened, part)

    def _send(self, opened: BinaryIO, part: re.Match[str] | None) -> None:
        with opened as file:
            size = os.fstat(file.fileno()).st_size
            first, count = _span(part) if part else (0, size)
            if first + count > size:
                self._send_status(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
            self._send_head(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK, count)
            self._send_bytes(file, first, count)

    def _send_head(self, status: HTTPStatus, count: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(count))
        self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()

    def _send_bytes(self, file: BinaryIO, first: int, count: int) -> None:
        self.wfile.flush()
        try:
            send_file(self.connection, file, first, count)
        except OSError:  # whoever asked has hung up
            self.close_connection = True

    def _send_status(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _open(directory: Path, name: str) -> BinaryIO | None:
    """Open a plain file; None if it is none, or a link, which could lead anywhere.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        place = os.open(directory, flags | os.O_DIRECTORY)
        try:
            descriptor = os.open(name, flags | os.O_NONBLOCK, dir_fd=place)
        finally:
            os.close(place)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb", buffering=0)
    os.close(descriptor)
    return None


def _span(part: re.Match[str]) -> tuple[int, int]:
    """The first byte that a Range asks for, and how many."""
    first, last = int(part[1]), int(part[2])
    return first, last + 1 - first
