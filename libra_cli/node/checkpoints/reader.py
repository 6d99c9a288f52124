"""Reads a checkpoint whose files are on several hosts: its own part here, the rest from the others.

Every host of a trainer has written what its own ranks hold. A rank that starts again where it was
finds nearly all it needs on its own host; one that starts elsewhere, or in another split, asks the
others for those bytes, and for no more.
"""

from __future__ import annotations

import http.client
import io
import pathlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import filesystem as of_files
from torch.distributed.checkpoint import metadata as of_metadata
from torch.distributed.checkpoint.filesystem import FileSystem

from libra_cli.config.errors import TrainerError
from libra_cli.node.credentials import Credentials, PeerConnection
from libra_cli.node.model.torch_objects import DESCRIPTION

STALL_S = 60.0
"""A host that sends nothing for this long is given up."""


class RemoteFile:
    """A file of the checkpoint on another host; nothing is asked for before its bytes are."""

    def __init__(self, source: CheckpointFiles, name: str) -> None:
        self._source = source
        self._name = name

    def part(self, start: int, length: int) -> io.BytesIO:
        return io.BytesIO(self._source.fetch(self._name, start, length))


class CheckpointFiles(FileSystem):  # type: ignore[misc]  # torch is not followed
    """The files of one checkpoint: of this host where it has them, else of another."""

    def __init__(
        self, directory: Path, urls: Sequence[str] = (), credentials: Credentials | None = None
    ) -> None:
        """``urls`` are those of ``node.checkpoints.server`` on the other hosts."""
        self._directory = directory
        self._urls = tuple(urls)
        self._credentials = credentials

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
        wanted = {} if length is None else {"Range": f"bytes={start}-{start + length - 1}"}
        problems = []
        for url in self._urls:
            try:
                data = self._ask(url, name, wanted)
            except (OSError, http.client.HTTPException) as error:
                problems.append(f"{url.partition('#')[0]}: {error}")
                continue
            if length in (None, len(data)):
                return data
            problems.append(f"{url.partition('#')[0]}: {len(data)} bytes of {length}")
        asked = "; ".join(problems) or "there is no other host to ask"
        raise TrainerError(
            f"{self._directory} has no {name}, and no other host gives it ({asked})",
            hint="every train host keeps its own part of a checkpoint, and all must answer",
        )

    def _ask(self, url: str, name: str, headers: Mapping[str, str]) -> bytes:
        assert self._credentials is not None, "where there are URLs there are credentials"
        with closing(PeerConnection(url, self._credentials.client(), STALL_S)) as connection:
            bearer = f"Bearer {self._credentials.token}"
            connection.request("GET", f"/{name}", headers={"Authorization": bearer, **headers})
            response = connection.getresponse()
            if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                raise http.client.HTTPException(f"HTTP {response.status} {response.reason}")
            return response.read()

    @contextmanager
    def create_stream(self, path: str | Path, mode: str) -> Iterator[IO[bytes] | RemoteFile]:
        """Open a file of tensors; of one on another host, only a handle is made."""
        path = Path(path)
        if path.parent != self._directory:  # its names come from a file
            raise TrainerError(f"{path} is no file of {self._directory}")
        if path.is_file() or mode != "rb":
            with path.open(mode) as stream:
                yield stream
        else:
            yield RemoteFile(self, path.name)


_METADATA = {
    of_metadata: DESCRIPTION,
    of_files: {"_StorageInfo"},
    torch.serialization: {"_get_layout"},
    torch: {"Size"},
    pathlib: {"PosixPath", "PurePosixPath"},
}
"""What torch's own description of a checkpoint is made of."""


class MetadataUnpickler(pickle.Unpickler):
    """Reads that description, which torch writes as a pickle, and lets it name nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names.

        Raises:
            TrainerError: it is nothing that a checkpoint's description is made of.
        """
        for known, names in _METADATA.items():
            if module == known.__name__ and name in names:
                return getattr(known, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise TrainerError(f".metadata of the checkpoint names {module}.{name}: it is not torch's")


class PlainValues(DefaultLoadPlanner):  # type: ignore[misc]  # torch is not followed
    """Loads what is no tensor, such as the learning rate, as plain values only."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Take in a value that is not a tensor."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class CheckpointReader(FileSystemReader):  # type: ignore[misc]  # torch is not followed
    """Reads a checkpoint for ``torch.distributed.checkpoint.load`` from this and other hosts."""

    def __init__(self, directory: Path, files: CheckpointFiles) -> None:
        super().__init__(directory)
        self.fs = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's description of the checkpoint; an unpickling that is bounded."""
        name = self._get_metadata_path(kwargs.get("rank")).name
        found = MetadataUnpickler(io.BytesIO(self.fs.read(name))).load()
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = of_metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        if isinstance(file, RemoteFile):
            return file.part(sinfo.offset, sinfo.length)
        sliced: IO[bytes] = super()._slice_file(file, sinfo)
        return sliced
