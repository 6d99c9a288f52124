"""Writes weight versions as directories, complete and never changed afterwards.

    <root>/v000007-e0/                    version 7 of the trainer's incarnation 0
      model-00000.safetensors ...         tensors under their Hugging Face names
      model-00000.safetensors.delta ...   how to make each of them from version 6's (``patch``)
      manifest.json                       names, shapes, dtypes, checksums, base of deltas, probe,
                                        and of an adapter its scaling and the model it belongs to

A directory appears by an atomic rename after everything in it is on disk, so whoever sees one sees
all of it. A tensor's checksum is of its numbers (``checksum``), and tells a server whether it holds
them; a file has digests of each of its chunks (``chunks``), by which hosts check what comes.
The probe is a fixed token sequence with the log-probabilities that this version gives it: a server
that computes as it should gives it nearly the same.

Deltas are written if the version before is still there and they save most of the bytes. Hosts pull
a version as soon as it appears, so its deltas must be there by then, and the step waits for them:
at most as long as for the files themselves, or ``DELTA_S`` with a small model.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from libra_cli.node.weights import patch
from libra_cli.node.weights.checksum import described
from libra_cli.node.weights.chunks import MANIFEST, listings

FILE_BYTES = 2 * 1024**3
"""A file is closed once it has this size, so that files are written and hashed in parallel."""
WRITERS = 4
DELTA_SHARE = 0.5
"""The largest delta, as a share of its file's size: rebuilding from a larger one would take a host
more time than the smaller transfer saves."""
DELTA_S = 1.0
log = logging.getLogger("libra.weights")
TensorT = TypeVar("TensorT", bound=Tensor)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A token sequence ``[T]`` and its log-probabilities ``[T - 1]`` at temperature 1, in nats.

    ``logprobs[i]`` is that of ``token_ids[i + 1]`` given the tokens before it.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class VersionOnDisk:
    """A published version: its name, size and time."""

    name: str
    version: int
    """Number of optimizer steps that the weights have had."""
    bytes: int
    """Size of its tensors' files, without deltas and manifest."""
    published_at: float
    """When it was complete, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class FileOnDisk:
    """A file of a version, as the manifest lists it."""

    name: str
    bytes: int
    digests: Mapping[str, Sequence[str]]
    """Digests of its chunks in order, by algorithm."""


_Described: TypeAlias = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of tensors, its delta if it has one, and what the manifest says of its tensors."""

    file: FileOnDisk
    delta: FileOnDisk | None
    tensors: _Described


def version_name(version: int, trainer_incarnation: int) -> str:
    """Return the name of a version's directory.

    A restarted trainer may publish a number again; its incarnation makes the name another.
    """
    return f"v{version:06d}-e{trainer_incarnation}"


def probe_tokens(vocabulary: int, count: int) -> list[int]:
    """Return ``count`` tokens from the whole vocabulary, the same ones in every process."""
    generator = torch.Generator().manual_seed(20776)
    tokens: list[int] = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
    return tokens


def publish(
    tensors: Iterable[tuple[str, Tensor]],
    root: Path,
    *,
    version: int,
    trainer_incarnation: int,
    probe: ProbeResult,
    keep: int,
    sums: Mapping[str, int] | None = None,
    adapter: Mapping[str, object] | None = None,
    others: Callable[[Path], Sequence[WrittenFile]] = lambda directory: (),
) -> VersionOnDisk:
    """Write one version and remove all but the last ``keep``.

    ``tensors`` are pairs of a Hugging Face name and a tensor on the CPU; ``sums`` are checksums
    that are known already. If they are an adapter's, ``adapter`` tells of what model. ``others``
    waits for what other ranks write into the directory (``parts``), whose name begins with a dot
    and the version's name.

    Raises:
        OSError: it cannot be written.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = version_name(version, trainer_incarnation)
    remove_unfinished(root)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=root))
    try:
        base = root / version_name(version - 1, trainer_incarnation)
        written = [*write_tensors(tensors, temporary, base, sums or {}), *others(temporary)]
        files = [one.file for one in written]
        manifest = {
            "version": version,
            "trainer_incarnation": trainer_incarnation,
            "name": name,
            "tensors": {name: entry for one in written for name, entry in one.tensors.items()},
            "files": _listed(files),
            "delta": _delta(base, written, temporary),
            **({"adapter": adapter} if adapter else {}),
            "probe": {"token_ids": list(probe.token_ids), "logprobs": list(probe.logprobs)},
        }
        write_durably(temporary / MANIFEST, json.dumps(manifest).encode())
        replace_directory(temporary, root / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    remove_old(root, "v*-e*", keep=keep)
    return VersionOnDisk(name, version, sum(file.bytes for file in files), time.time())


def _delta(base: Path, written: Sequence[WrittenFile], directory: Path) -> dict[str, object] | None:
    """The manifest's entry. One file without a delta makes those of the others useless."""
    deltas = [one.delta for one in written if one.delta is not None]
    if len(deltas) == len(written):
        return {"base": base.name, "files": _listed(deltas)}
    for delta in deltas:
        (directory / delta.name).unlink()
    return None


def _listed(files: Iterable[FileOnDisk]) -> _Described:
    return {file.name: {"bytes": file.bytes, **file.digests} for file in files}


def write_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    directory: Path,
    base: Path,
    sums: Mapping[str, int],
    *,
    prefix: str = "model",
) -> list[WrittenFile]:
    """Write named tensors to files called ``prefix`` and a number, and their deltas from ``base``.

    Raises:
        OSError: they cannot be written.
    """
    with ThreadPoolExecutor(WRITERS) as pool:
        writes = [
            pool.submit(
                _write_file, directory / f"{prefix}-{number:05d}.safetensors", part, base, sums
            )
            for number, part in enumerate(in_chunks(tensors, FILE_BYTES))
        ]
        return [write.result() for write in writes]


def in_chunks(tensors: Iterable[tuple[str, TensorT]], size: int) -> Iterator[dict[str, TensorT]]:
    """Cut a sequence of named tensors after every ``size`` bytes, at the ends of tensors."""
    chunk: dict[str, TensorT] = {}
    filled = 0
    for name, tensor in tensors:
        chunk[name] = tensor
        filled += tensor.nbytes
        if filled >= size:
            yield chunk
            chunk, filled = {}, 0
    if chunk:
        yield chunk


def _write_file(
    path: Path, part: dict[str, Tensor], base: Path, sums: Mapping[str, int]
) -> WrittenFile:
    started = time.monotonic()
    try:
        save_file(part, path, metadata={"format": "pt"})
    except SafetensorError as error:  # what it says of a full disk is no OSError
        raise OSError(f"{path} cannot be written: {error}") from error
    file = _on_disk(path)
    within_s = max(DELTA_S, time.monotonic() - started)
    # Everything in a safetensors file begins at a multiple of its smallest element's size.
    word_bytes = min(tensor.element_size() for tensor in part.values())
    delta = _write_delta(base / path.name, path, word_bytes, within_s)
    entries = {name: _entry(path, tensor, sums.get(name)) for name, tensor in part.items()}
    return WrittenFile(file, delta, entries)


def _entry(path: Path, tensor: Tensor, known: int | None) -> dict[str, object]:
    """Return what the manifest says of a tensor: its file, shape, dtype and checksum."""
    return {"file": path.name, **described(tensor, known)}


def _write_delta(base: Path, path: Path, word_bytes: int, within_s: float) -> FileOnDisk | None:
    """Write a delta; None if it would be too large or cannot be written, since none is needed."""
    delta = path.with_name(path.name + patch.SUFFIX)
    limit = int(DELTA_SHARE * path.stat().st_size)
    try:
        if base.is_file() and patch.encode(
            base, path, delta, word_bytes=word_bytes, limit=limit, within_s=within_s
        ):
            return _on_disk(delta)
    except OSError as error:  # a full disk, first of all
        log.warning("%s is published without a delta: %s", path, error)
    delta.unlink(missing_ok=True)
    return None


def _on_disk(path: Path) -> FileOnDisk:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    found = listings(path)
    size = path.stat().st_size
    return FileOnDisk(path.name, size, {name: one.digests for name, one in found.items()})


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_directory(temporary: Path, final: Path) -> None:
    """Rename a complete directory, and wait until that is on disk."""
    _sync_directory(temporary)
    if final.exists():
        # Left by a crash after the rename and before anyone heard of it; the new one is as good.
        shutil.rmtree(final)
    temporary.rename(final)
    _sync_directory(final.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(root: Path) -> None:
    """Remove hidden directories, which a writer that was killed left; a root has one writer."""
    for leftover in root.glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_old(root: Path, pattern: str, *, keep: int) -> None:
    """Remove all but the ``keep`` directories that were written last."""
    found = sorted(root.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in found[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
