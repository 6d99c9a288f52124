"""Serves the weight versions that a host has to its peers, and pulls those that it lacks.

A version is a directory with a ``manifest.json`` that gives the size of every file and the digests
of each of its chunks. Only plain files of versions are served, and only to hosts of the run (mutual
TLS). A pull is complete or has no effect: files go to a hidden directory (``draft``), chunk by
chunk and each checked, from all hosts that have some (``download``), and the directory is renamed
once all of them are right. Chunks that have come are served meanwhile; if the pull fails, they are
kept for the next attempt.

If the manifest names a delta and this host has its base, only the delta travels, and a process of
its own (``node.weights.patch``, which needs numpy; the agent has only the standard library)
rebuilds the files. They are checked as if they had arrived. If that fails, a full copy is fetched.

With a seat in a process group (``fabric``) the files come by that first, and only what has not come
so is pulled.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.credentials import Credentials
from libra_cli.node.http import HostServer, serve_hosts
from libra_cli.node.weights.chunks import (
    MANIFEST,
    NAME,
    VERSION,
    ListedFile,
    Manifest,
    ManifestError,
    listed,
    read_manifest,
)
from libra_cli.node.weights.download import Client, Download, DownloadFailed, place_of
from libra_cli.node.weights.draft import Draft
from libra_cli.node.weights.fabric import FabricMember
from libra_cli.node.weights.weight_handler import WeightHandler

FABRIC = "fabric"
"""The kind of a pull that came by a process group whole, and its source's name."""
PATCH_BYTES_S = 20e6
"""What rebuilding makes at least in a second, besides the time that a pull may be silent."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """Where a pulled version lies and how it came there."""

    path: str
    kind: str
    """``full | delta | fabric``, or ``local`` where the version was there already."""
    sent_by: Mapping[str, int]
    """Bytes of chunks that came over the network for it, used or not, by source."""
    seconds: float
    detail: str = ""
    """Why the fabric, or a delta that was offered, could not be used; empty otherwise."""


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """A host's place in a process group that a version travels by."""

    group: str
    """A name that no other group has."""
    addresses: Sequence[str]
    """Where the ranks listen, in their order; in base64."""


class WeightServer:
    """Serves, pulls and removes the weight versions of one run on one host."""

    def __init__(self, root: Path, credentials: Credentials | None) -> None:
        self.root = root
        self._credentials = credentials
        self._pulling: dict[str, threading.Lock] = {}
        self._drafts: dict[str, Draft] = {}
        self._numbers = count()
        self._server: HostServer | None = None
        self.fabric = FabricMember()
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_ours(root.parent)
        root.mkdir(mode=0o700, exist_ok=True)

    def serve(self, bind: str, port: int) -> int:
        """Serve the directory to peers and return the port; once, however often it is called.

        Raises:
            AgentRefused: it cannot listen there.
        """
        if self._server is None:
            self._server = self._start(bind, port)
        return int(self._server.server_address[1])

    def _start(self, bind: str, port: int) -> HostServer:
        try:
            return serve_hosts(
                WeightHandler,
                bind=bind,
                port=port,
                credentials=self._known(),
                is_reserved=port > 0,
                root=self.root,
                drafts=self._drafts,
            )
        except OSError as error:
            raise AgentRefused("weights", f"{bind} port {port}: {error}") from error

    def _known(self) -> Credentials:
        if self._credentials is None:
            raise AgentRefused("weights", "no certificate is here to show to other hosts")
        return self._credentials

    def send(self, name: str, seat: GroupSeat, patience_s: float) -> None:
        """Send a version that is here to the other ranks of a group. Blocks.

        Raises:
            AgentRefused: the version is not here, or the rank after this one is lost.
        """
        _check_name(name)
        if not (self.root / name).is_dir():
            raise AgentRefused("weights", f"{name} is not here")
        self.fabric.send(seat.group, seat.addresses, self.root / name, patience_s)

    def pull(
        self, name: str, sources: Sequence[str], patience_s: float, seat: GroupSeat | None = None
    ) -> PullResult:
        """Fetch a version from all sources that have some of it, unless it is here. Blocks.

        It may take as long as it likes, but no ``patience_s`` without a byte.
        ``sources`` are other hosts that have it or pull it too, and the publisher's last. With a
        ``seat`` it comes by that group, and from the sources only what has not come so.

        Raises:
            AgentRefused: they could not give it, or the disk is full.
        """
        _check_name(name)
        started = time.monotonic()
        target = self.root / name
        with self._pulling.setdefault(name, threading.Lock()):
            if target.exists():
                return PullResult(str(target), "local", {}, time.monotonic() - started)
            if not sources:
                raise AgentRefused("weights", f"{name}: no source was given")
            draft = self._draft(name, sources)
            pull = _Pull(self.root, name, draft, sources, self._known(), patience_s)
            try:
                kind = pull.run_with(self.fabric, seat) if seat is not None else pull.run()
                draft.directory.rename(target)
                del self._drafts[name]
            except DownloadFailed as error:
                raise AgentRefused("weights", f"{name}: {error}") from error
            finally:
                if not draft.is_begun:
                    self._drop(name)
            seconds = time.monotonic() - started
            return PullResult(str(target), kind, pull.received, seconds, pull.detail)

    def _draft(self, name: str, sources: Sequence[str]) -> Draft:
        """What an earlier attempt has left of the same version, or a new one."""
        raw, manifest = self._manifest(name, sources)
        draft = self._drafts.get(name)
        if draft is not None and draft.raw == raw:
            return draft
        self._drop(name)
        # Another directory every time: a thread that waited for a dead source may still write.
        directory = self.root / f".pull-{name}-{os.getpid()}-{next(self._numbers)}"
        self._drafts[name] = Draft(directory, raw, manifest)
        return self._drafts[name]

    def _manifest(self, name: str, sources: Sequence[str]) -> tuple[bytes, Manifest]:
        here = self._known()
        failures, tls = [], here.client()
        for source in reversed(sources):  # the publisher has it for certain
            client = Client(source, here, tls)
            try:
                raw = client.get(f"/{name}/{MANIFEST}")
                return raw, read_manifest(raw)
            except ManifestError as error:
                failures.append(f"{place_of(source)}: {error}")
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{place_of(source)}: {MANIFEST}: {error}")
            finally:
                client.close()
        raise AgentRefused("weights", f"{name}: {'; '.join(failures)}")

    def _drop(self, name: str) -> None:
        draft = self._drafts.pop(name, None)
        if draft is not None:
            draft.remove()

    def forget(self, keep: Collection[str]) -> list[str]:
        """Remove every version but these, and return the names of the removed ones."""
        for name in set(self._drafts) - set(keep):
            if self._pulling[name].acquire(blocking=False):  # it is not under way
                self._drop(name)
                self._pulling[name].release()
        gone = [one for one in self.root.iterdir() if one.is_dir() and one.name not in keep]
        # Directories with other names are no versions: a pull under way, a worker's gradients.
        gone = [one for one in gone if VERSION.fullmatch(one.name)]
        for one in gone:
            self._remove(one.name)
        return sorted(one.name for one in gone)

    def _remove(self, name: str) -> None:
        # Renamed first, so that nobody begins to read a version that is half removed.
        gone = (self.root / name).rename(self.root / f".gone-{name}")
        shutil.rmtree(gone, ignore_errors=True)

    def damaged(self, name: str) -> str:
        """Compare a version that is here with its manifest: a file that is wrong, or nothing.

        A wrong one is removed, so that it is pulled again, or written again where it was published.
        """
        _check_name(name)
        place = self.root / name
        if not place.is_dir():
            return ""
        try:
            files = read_manifest((place / MANIFEST).read_bytes()).files
            wrong = next(
                (name for name, one in files.items() if listed(place / name, one.algorithm) != one),
                "",
            )
        except (OSError, ManifestError):
            wrong = MANIFEST
        if wrong:
            with suppress(FileNotFoundError):  # the trainer removes those that are too old
                self._remove(name)
        return wrong

    def close(self) -> None:
        """Stop serving and pulling, and remove all versions."""
        for draft in list(self._drafts.values()):
            draft.is_wanted = False
        self.fabric.close()
        if self._server is not None:
            self._server.shutdown()  # or its thread would ask a closed socket for ever
            self._server.server_close()
        shutil.rmtree(self.root, ignore_errors=True)


def _make_ours(directory: Path) -> None:
    """Refuse a directory of others, who may write beside it, and let nobody else write in ours.

    A link there is somebody else's trap, unless we have made it.
    """
    for owner in (directory.lstat().st_uid, directory.stat().st_uid):
        if owner != os.getuid():
            raise AgentRefused(
                "weights", f"{directory} belongs to the user with id {owner}, not to us"
            )
    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


class _RebuildFailed(Exception):
    """The files could not be rebuilt from a delta; a full copy is fetched instead."""


class _Pull:
    """One attempt to complete a draft, by delta or by a full copy."""

    def __init__(
        self,
        root: Path,
        name: str,
        draft: Draft,
        sources: Sequence[str],
        credentials: Credentials,
        patience_s: float,
    ) -> None:
        self._root = root
        self._name = name
        self._draft = draft
        self._sources = sources
        self._credentials = credentials
        self._patience_s = patience_s
        self.received = dict.fromkeys(sources, 0)
        self.detail = ""

    def run(self) -> str:
        """Fetch and check all files; return ``delta`` or ``full``, by which they came.

        Raises:
            DownloadFailed: the sources could not give all of them.
            AgentRefused: the disk has no room for them.
        """
        manifest = self._draft.manifest
        # A host that is further behind has no base, and a full copy that broke off goes on.
        is_full = not manifest.files.keys().isdisjoint(self._draft.states())
        if manifest.base and (self._root / manifest.base).is_dir() and not is_full:
            try:
                self._rebuild(manifest)
            except (_RebuildFailed, DownloadFailed) as error:
                self.detail = f"a full copy, since by delta {error}"
                # It takes the full copy's space.
                self._draft.drop([*manifest.deltas, *manifest.files])
            else:
                return "delta"
        self._fetch(manifest.files)
        return "full"

    def run_with(self, fabric: FabricMember, seat: GroupSeat) -> str:
        """Receive all files by a group; return ``fabric`` then, and as ``run`` if some are missing.

        Raises:
            DownloadFailed: the sources could not give the rest.
            AgentRefused: the disk has no room for the files.
        """
        draft, files = self._draft, self._draft.manifest.files
        draft.expect(files)
        try:
            fabric.receive(seat.group, seat.addresses, draft.directory, draft.came)
        except AgentRefused as error:
            self.detail = str(error)
        missing = draft.missing_bytes(files)
        self.received[FABRIC] = sum(one.bytes for one in files.values()) - missing
        if not missing:
            return FABRIC
        self.detail = self.detail or "what came is damaged"
        if not draft.is_begun:
            draft.drop(files)  # so that a delta may serve
        return self.run()

    def _fetch(self, files: Mapping[str, ListedFile]) -> None:
        self._draft.expect(files)
        download = Download(
            self._draft,
            self._name,
            files,
            self._sources,
            credentials=self._credentials,
            deadline=time.monotonic() + self._patience_s,
        )
        try:
            download.run()
        finally:
            for source, size in download.received.items():
                self.received[source] += size

    def _rebuild(self, manifest: Manifest) -> None:
        missing = sum(map(self._draft.missing_bytes, (manifest.files, manifest.deltas)))
        if missing > self._draft.free():
            raise _RebuildFailed("it would not fit beside its delta")
        self._fetch(manifest.deltas)
        self._patch(self._root / manifest.base)
        if wrong := self._draft.adopt(manifest.files):
            raise _RebuildFailed(f"{wrong} is damaged")

    def _patch(self, base: Path) -> None:
        """Rebuild the files in the draft from those in ``base`` and the deltas in the draft."""
        module = [sys.executable, "-P", "-m", "libra_cli.node.weights.patch"]
        rebuilt = sum(one.bytes for one in self._draft.manifest.files.values())
        try:
            done = subprocess.run(
                [*module, str(base), str(self._draft.directory)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._patience_s + rebuilt / PATCH_BYTES_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _RebuildFailed(f"nothing was rebuilt: {error}") from error
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise _RebuildFailed(f"nothing was rebuilt: {last or f'exit code {done.returncode}'}")


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise AgentRefused("request", f"{name!r} is no name for a weight version")
