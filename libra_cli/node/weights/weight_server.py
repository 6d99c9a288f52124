"""Serves the weight versions that a host has to its peers, and pulls those that it lacks.

A version is a directory with a ``manifest.json`` that gives size and SHA-256 of every file. Only
plain files in a version's directory are served, and only to bearers of the run's token. A pull is
complete or has no effect: files go to a hidden directory beside the target, are checked while they
arrive, and the directory is renamed once all of them are right.

If the manifest names a delta and this host has its base, only the delta travels, and a process of
its own (``node.weights.patch``, which needs numpy; the agent has only the standard library)
rebuilds the files. They are checked as if they had arrived. If that fails, a full copy is fetched.
"""

from __future__ import annotations

import errno
import hashlib
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
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from libra_cli.node.agent.agent_errors import AgentRefused
from libra_cli.node.http import BearerHandler, start

MANIFEST = "manifest.json"
DELTA = ".delta"
"""Suffix of a delta's name, after the name of the file that it rebuilds."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
VERSION = re.compile(r"v\d+-e\d+")
CHUNK = 1024**2
STREAMS = 4
"""How many files are fetched at a time: one stream does not fill a fast network."""
STALL_S = 15.0
"""A source that sends nothing for this long is given up."""
PATCH_SHARE = 0.5
"""Share of the remaining time that rebuilding may take, so that a full copy has time too."""

# A cluster's http_proxy is meant for the world outside, not for the host next door.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class PullResult:
    """Where a pulled version lies and how it came there."""

    path: str
    source: str
    kind: str
    """``full | delta``, or ``local`` where the version was there already."""
    sent_bytes: int
    """All bytes that came over the network for it, from all sources, used or not."""
    seconds: float
    detail: str = ""
    """Why a delta that was offered could not be used; empty otherwise."""


class WeightServer:
    """Serves, pulls and removes the weight versions of one run on one host."""

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
        """Serve the directory to peers and return the port; once, however often it is called."""
        if self._server is None:
            self._server = start(
                _WeightHandler, bind=bind, port=port, token=self._token, root=self.root
            )
        return int(self._server.server_address[1])

    def pull(self, name: str, sources: Sequence[str], timeout_s: float) -> PullResult:
        """Fetch a version from the first source that has all of it, unless it is here. Blocks.

        Raises:
            AgentRefused: no source gave it whole in ``timeout_s``, or the disk is full.
        """
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
        """Remove every version but these, and return the names of the removed ones."""
        gone = [one for one in self.root.iterdir() if one.is_dir() and one.name not in keep]
        # Directories with other names are no versions: a pull under way, a worker's gradients.
        gone = [one for one in gone if VERSION.fullmatch(one.name)]
        for one in gone:
            # Renamed first, so that nobody begins to read a version that is half removed.
            shutil.rmtree(one.rename(self.root / f".gone-{one.name}"), ignore_errors=True)
        return sorted(one.name for one in gone)

    def close(self) -> None:
        """Stop serving and remove all versions."""
        if self._server is not None:
            self._server.server_close()
        shutil.rmtree(self.root, ignore_errors=True)


class _Failed(Exception):
    """One source could not give the version; another may."""


_Files: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By name the size in bytes and the SHA-256 of each file, as the manifest lists them."""


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
        """Bytes of each file that was fetched, whole or in part."""
        self.detail = ""

    def run(self, target: Path) -> str:
        """Fetch, check, and put in place; return ``delta`` or ``full``."""
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
        # A host that is several versions behind has no base.
        if delta is not None and (self._root / delta["base"]).is_dir():
            try:
                self._rebuild(files, delta)
            except _Failed as error:
                self.detail = f"a full copy, since by delta {error}"
                for file in (*files, *delta["files"]):
                    (self._draft / file).unlink(missing_ok=True)  # it takes the full copy's space
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
        """Return size and SHA-256 of a file of the draft."""
        try:
            with (self._draft / file).open("rb") as rebuilt:
                digest = hashlib.file_digest(rebuilt, "sha256").hexdigest()
                return os.fstat(rebuilt.fileno()).st_size, digest
        except OSError as error:
            raise _Failed(f"{file}: {error}") from error

    def _fetch(self, file: str) -> tuple[int, str]:
        """Fetch one file into the draft; return its size and SHA-256."""
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


class _WeightHandler(BearerHandler):
    """Answers ``GET /<version>/<file>``."""

    timeout: ClassVar[float | None] = 60.0
    root: Path

    def do_GET(self) -> None:  # noqa: N802  http.server calls it
        if not self.is_trusted():
            self._refuse(HTTPStatus.UNAUTHORIZED)
        elif (path := self._wanted()) is None:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._send(path)

    def _wanted(self) -> Path | None:
        version, _, file = self.path.removeprefix("/").partition("/")
        path = self.root / version / file
        plain = NAME.fullmatch(version) and NAME.fullmatch(file)
        # A link could lead anywhere, so the path must be the very one that was asked for.
        if plain and path.is_file() and path.resolve() == self.root.resolve() / version / file:
            return path
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


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise AgentRefused("request", f"{name!r} is no name for a weight version")
