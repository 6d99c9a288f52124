"""Weight versions going from host to host: every host serves what it has and pulls what it lacks.

A version is a directory with a ``manifest.json`` that gives size and SHA-256 of every file. Served
are only plain files one level below the weights directory, only to a bearer of the run's token. A
pull is complete or has not happened: files go to a hidden directory beside the target, are checked
while they arrive, and the directory is renamed once all of them are right.

Where the manifest names a delta and its base is here, only the delta travels, and a process of its
own (``node.patch``; this one has no more than the standard library) rebuilds the files beside it.
They are checked as if they had arrived. Whatever goes wrong with that ends in a full copy.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from libra_cli.node.agent.agent_errors import AgentRefused

MANIFEST = "manifest.json"
DELTA = ".delta"
"""Added to the name of the file that it rebuilds."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
VERSION = re.compile(r"v\d+-e\d+")
CHUNK = 1024**2
STREAMS = 4
"""Files fetched at a time: one stream does not fill a fast network."""
STALL_S = 15.0
"""A source that sends nothing for this long is given up."""
PATCH_SHARE = 0.5
"""Of the time that is left: so that a full copy has time too."""

# A cluster's http_proxy is meant for the world outside, not for the host next door.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did."""

    path: str
    source: str
    kind: str
    """``full | delta``, or ``local`` where the version was there already."""
    sent_bytes: int
    """Everything that came over the network for it, from whichever source, of use or not."""
    seconds: float
    detail: str = ""
    """Why a delta that was offered was of no use."""


class WeightServer:
    """The weight versions of one run on one host."""

    def __init__(self, root: Path, token: str) -> None:
        self.root = root
        self._token = token
        self._pulling: dict[str, threading.Lock] = {}
        self._server: ThreadingHTTPServer | None = None
        # In a place where others may write, only a directory of our own is to be trusted.
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = root.parent.stat().st_uid
        if owner != os.getuid():
            raise AgentRefused(
                "weights", f"{root.parent} belongs to the user with id {owner}, not to us"
            )
        root.mkdir(mode=0o700, exist_ok=True)

    def serve(self, bind: str, port: int) -> int:
        """Serve the directory to peers; the port. A second call answers with the first's."""
        if self._server is None:
            handler = type("Handler", (_WeightHandler,), {"root": self.root, "token": self._token})
            self._server = ThreadingHTTPServer((bind, port), handler)
            # It is never told to stop, since it ends with the agent: so it need not wake up to ask.
            loop = threading.Thread(target=self._server.serve_forever, args=(3600.0,), daemon=True)
            loop.start()
        return int(self._server.server_address[1])

    def pull(self, name: str, sources: Sequence[str], timeout_s: float) -> PullResult:
        """Fetch a version from the first source that has all of it. Blocks."""
        _check_name(name)
        started = time.monotonic()
        target = self.root / name
        with self._pulling.setdefault(name, threading.Lock()):
            if target.exists():
                return PullResult(str(target), "", "local", 0, time.monotonic() - started)
            failures, sent_bytes = [], 0
            for source in sources:
                pull = _Pull(self.root, name, source, self._token, started + timeout_s)
                try:
                    kind = pull.run(target)
                except _Failed as error:
                    failures.append(f"{source}: {error}")
                    sent_bytes += sum(pull.received)
                else:
                    sent_bytes += sum(pull.received)
                    seconds = time.monotonic() - started
                    return PullResult(str(target), source, kind, sent_bytes, seconds, pull.detail)
        raise AgentRefused("weights", f"{name}: " + ("; ".join(failures) or "no source was given"))

    def forget(self, keep: Collection[str]) -> list[str]:
        """Remove every other version, and say which."""
        gone = [one for one in self.root.iterdir() if one.is_dir() and one.name not in keep]
        # What has another name is no version: a pull under way, a gradient worker's outbox.
        gone = [one for one in gone if VERSION.fullmatch(one.name)]
        for one in gone:
            # Out of sight in one step, so that nobody begins to read what is half removed.
            shutil.rmtree(one.rename(self.root / f".gone-{one.name}"), ignore_errors=True)
        return sorted(one.name for one in gone)

    def close(self) -> None:
        """Free the memory the versions take up."""
        if self._server is not None:
            self._server.server_close()
        shutil.rmtree(self.root, ignore_errors=True)


class _Failed(Exception):
    """One source could not give the version; another may."""


_Files: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Name -> size and SHA-256, as the manifest lists them."""


class _Pull:
    """One attempt to fetch one version from one source."""

    def __init__(self, root: Path, name: str, source: str, token: str, deadline: float) -> None:
        self._root = root
        self._draft = root / f".pull-{name}-{os.getpid()}"
        self._name = name
        self._base = f"{source.rstrip('/')}/{name}"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._deadline = deadline
        self.received: list[int] = []
        """Bytes of each file that was fetched, or of the part of it that came."""
        self.detail = ""

    def run(self, target: Path) -> str:
        """Fetch, check, and put in place; ``delta`` or ``full``."""
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(mode=0o700)
        try:
            self._fetch(MANIFEST)
            manifest = self._manifest()
            kind = self._fill(manifest["files"], manifest.get("delta"))
            self._draft.rename(target)
        finally:
            shutil.rmtree(self._draft, ignore_errors=True)
        return kind

    def _fill(self, files: _Files, delta: Mapping[str, Any] | None) -> str:
        # A host that is several versions behind has not got the base.
        if delta is not None and (self._root / delta["base"]).is_dir():
            try:
                self._rebuild(files, delta)
            except _Failed as error:
                self.detail = f"a full copy, since by delta {error}"
                for file in (*files, *delta["files"]):
                    (self._draft / file).unlink(missing_ok=True)  # it takes the copy's space
            else:
                return "delta"
        free, needed = self._free(), _size(files)
        if needed > free:
            where = self._draft.parent
            raise AgentRefused(
                "disk", f"{self._name} needs {needed} bytes in {where}, {free} are free"
            )
        self._fetch_all(files)
        return "full"

    def _rebuild(self, files: _Files, delta: Mapping[str, Any]) -> None:
        if _size(files) + _size(delta["files"]) > self._free():
            raise _Failed("it would not fit beside its delta")
        self._fetch_all(delta["files"])
        self._patch(self._root / delta["base"])
        with ThreadPoolExecutor(STREAMS) as threads:
            for file, found in zip(files, threads.map(self._read, files), strict=True):
                _compare(file, found, files[file])

    def _manifest(self) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads((self._draft / MANIFEST).read_bytes())
            files, delta = manifest["files"], manifest.get("delta")
            wrong = [name for name in files if not NAME.fullmatch(name) or name == MANIFEST]
            if delta is not None:
                if not NAME.fullmatch(delta["base"]):
                    wrong.append(delta["base"])
                wrong += {*delta["files"]} ^ {file + DELTA for file in files}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _Failed(f"its {MANIFEST} is damaged") from error
        if wrong:
            raise _Failed(f"its {MANIFEST} names {wrong[0]!r}, which is no plain file name")
        return manifest

    def _free(self) -> int:
        return shutil.disk_usage(self._draft).free

    def _fetch_all(self, files: _Files) -> None:
        with ThreadPoolExecutor(STREAMS) as streams:
            for file, found in zip(files, streams.map(self._fetch, files), strict=True):
                _compare(file, found, files[file])

    def _patch(self, base: Path) -> None:
        """Rebuild the files in the draft from those in ``base`` and the deltas in the draft."""
        module = [sys.executable, "-P", "-m", "libra_cli.node.weights.patch"]
        left_s = max(0.0, self._deadline - time.monotonic())
        try:
            done = subprocess.run(
                [*module, str(base), str(self._draft)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PATCH_SHARE * left_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _Failed(f"nothing was rebuilt: {error}") from error
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise _Failed(f"nothing was rebuilt: {last or f'exit code {done.returncode}'}")

    def _read(self, file: str) -> tuple[int, str]:
        """Size and SHA-256 of a file of the draft."""
        try:
            with (self._draft / file).open("rb") as rebuilt:
                digest = hashlib.file_digest(rebuilt, "sha256").hexdigest()
                return os.fstat(rebuilt.fileno()).st_size, digest
        except OSError as error:
            raise _Failed(f"{file}: {error}") from error

    def _fetch(self, file: str) -> tuple[int, str]:
        """One file into the draft; its size and SHA-256."""
        request = urllib.request.Request(f"{self._base}/{file}", headers=self._headers)
        try:
            with (
                _direct.open(request, timeout=STALL_S) as response,
                open(self._draft / file, "wb", buffering=0) as target,
            ):
                return self._copy(iter(lambda: response.read(CHUNK), b""), target)
        except urllib.error.HTTPError as error:
            raise _Failed(f"{file}: HTTP {error.code} {error.reason}") from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise AgentRefused("disk", f"{self._draft.parent} is full") from error
            raise _Failed(f"{file}: {error}") from error

    def _copy(self, chunks: Iterable[bytes], target: Any) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        try:
            for chunk in chunks:
                if time.monotonic() > self._deadline:
                    raise _Failed("not done in time")
                target.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        finally:
            self.received.append(size)
        return size, digest.hexdigest()


def _size(files: _Files) -> int:
    return sum(int(entry["bytes"]) for entry in files.values())


def _compare(file: str, found: tuple[int, str], entry: Mapping[str, Any]) -> None:
    if found != (entry.get("bytes"), entry.get("sha256")):
        size, digest = found
        raise _Failed(f"{file} is damaged: {size} bytes with SHA-256 {digest[:12]}...")


class _WeightHandler(BaseHTTPRequestHandler):
    """``GET /<version>/<file>``, and nothing else."""

    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float | None] = 60.0
    root: Path
    token: str

    def do_GET(self) -> None:
        path = self._wanted() if self._is_trusted() else None
        if path is not None:
            self._send(path)

    def _is_trusted(self) -> bool:
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED)
        return False

    def _wanted(self) -> Path | None:
        version, _, file = self.path.removeprefix("/").partition("/")
        path = self.root / version / file
        plain = NAME.fullmatch(version) and NAME.fullmatch(file)
        # A link could lead anywhere, so the answer must be the very place that was asked for.
        if plain and path.is_file() and path.resolve() == self.root.resolve() / version / file:
            return path
        self._refuse(HTTPStatus.NOT_FOUND)
        return None

    def _send(self, path: Path) -> None:
        with path.open("rb") as file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.send_header("Content-Type", "application/octet-stream")
            self.end_headers()
            self.wfile.flush()
            self.connection.sendfile(file)

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """The agent's log is for what goes wrong; who pulls hears of it from its own errors."""


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise AgentRefused("request", f"{name!r} is no name for a weight version")
