"""Reads a checkpoint whose files are on several hosts: its own part here, the rest from the others.

Every host of a trainer has written what its own ranks hold. A rank that starts again where it was
finds nearly all it needs on its own host; one that starts elsewhere, or in another split, asks the
others for those bytes, and for no more.
"""

from __future__ import annotations

import io
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem

from libra_cli.config.errors import TrainerError

STALL_S = 60.0
"""A host that sends nothing for this long is given up."""

# A cluster's http_proxy is meant for the world outside, not for the host next door.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RemoteFile:
    """A file of the checkpoint on another host; nothing is asked for before its bytes are."""

    def __init__(self, source: CheckpointFiles, name: str) -> None:
        self._source = source
        self._name = name

    def part(self, start: int, length: int) -> io.BytesIO:
        """Return ``length`` bytes from ``start`` on."""
        return io.BytesIO(self._source.fetch(self._name, start, length))


class CheckpointFiles(FileSystem):  # type: ignore[misc]  # torch is not followed
    """The files of one checkpoint: of this host where it has them, else of another."""

    def __init__(self, directory: Path, urls: Sequence[str] = (), token: str = "") -> None:
        """``urls`` are those of ``node.checkpoints.server`` on the other hosts."""
        self._directory = directory
        self._urls = tuple(urls)
        self._token = token

    def read(self, name: str) -> bytes:
        """Return a whole file, one of the small ones.

        Raises:
            TrainerError: no host has it.
        """
        path = self._directory / name
        return path.read_bytes() if path.is_file() else self.fetch(name)

    def fetch(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a file of another host, or a part of it.

        Raises:
            TrainerError: no host has it, or none gives it.
        """
        problems = []
        for url in self._urls:
            request = urllib.request.Request(f"{url}/{name}")
            request.add_header("Authorization", f"Bearer {self._token}")
            if length is not None:
                request.add_header("Range", f"bytes={start}-{start + length - 1}")
            try:
                with _direct.open(request, timeout=STALL_S) as response:
                    data: bytes = response.read()
            except (urllib.error.URLError, OSError) as error:
                problems.append(f"{url}: {error}")
                continue
            if length in (None, len(data)):
                return data
            problems.append(f"{url}: {len(data)} bytes of {length}")
        asked = "; ".join(problems) or "there is no other host to ask"
        raise TrainerError(
            f"{self._directory} has no {name}, and no other host gives it ({asked})",
            hint="every train host keeps its own part of a checkpoint, and all must answer",
        )

    @contextmanager
    def create_stream(self, path: str | Path, mode: str) -> Iterator[IO[bytes] | RemoteFile]:
        """Open a file of the checkpoint; of tensors on another host, only a handle is made."""
        path = Path(path)
        if path.is_file() or mode != "rb":
            with path.open(mode) as stream:
                yield stream
        elif path.suffix == ".distcp":
            yield RemoteFile(self, path.name)
        else:
            yield io.BytesIO(self.fetch(path.name))


class CheckpointReader(FileSystemReader):  # type: ignore[misc]  # torch is not followed
    """What ``torch.distributed.checkpoint.load`` reads with."""

    def __init__(self, directory: Path, files: CheckpointFiles) -> None:
        super().__init__(directory)
        self.fs = files

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        if isinstance(file, RemoteFile):
            return file.part(sinfo.offset, sinfo.length)
        sliced: IO[bytes] = super()._slice_file(file, sinfo)
        return sliced
