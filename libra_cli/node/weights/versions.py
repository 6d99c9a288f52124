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
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from libra_cli.node.weights.checksum import MODULUS
from libra_cli.node.weights.chunks import MANIFEST, VERSION
from libra_cli.node.weights.files import FileOnDisk, WrittenFile, write_durably
from libra_cli.node.weights.layout import FileLayout, layout_of
from libra_cli.node.weights.parts import Share
from libra_cli.node.weights.tensor_rows import RowsKey, TensorRows

_Described: TypeAlias = dict[str, dict[str, object]]


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
    pieces: Iterable[TensorRows],
    root: Path,
    *,
    version: int,
    trainer_incarnation: int,
    probe: ProbeResult,
    keep: int,
    sums: Mapping[RowsKey, int] | None = None,
    adapter: Mapping[str, object] | None = None,
    share: Share | None = None,
) -> VersionOnDisk:
    """Write one version and remove all but the last ``keep``.

    ``pieces`` are on the CPU, what this process has of each tensor; ``sums`` are checksums that are
    known already. If they are an adapter's, ``adapter`` tells of what model. ``share`` says who
    else writes into the directory (``parts``), whose name begins with a dot and the version's name.

    Raises:
        OSError: it cannot be written.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = version_name(version, trainer_incarnation)
    remove_unfinished(root)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=root))
    try:
        base = root / version_name(version - 1, trainer_incarnation)
        own, share = [*pieces], share or Share()
        layout = layout_of(own, files=share.writers)
        part = share.write(own, layout, temporary, base, sums or {})
        written = sorted(part.files, key=lambda one: one.file.name)
        manifest = {
            "version": version,
            "trainer_incarnation": trainer_incarnation,
            "name": name,
            "tensors": _tensors(layout, part.sums),
            "files": _listed(one.file for one in written),
            "delta": _delta(base, written, temporary),
            **({"adapter": adapter} if adapter else {}),
            "probe": {"token_ids": list(probe.token_ids), "logprobs": list(probe.logprobs)},
        }
        write_durably(temporary / MANIFEST, json.dumps(manifest).encode())
        replace_directory(temporary, root / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _remove_old(root, keep=keep)
    size = sum(one.file.bytes for one in written)
    return VersionOnDisk(name, version, size, time.time())


def _tensors(layout: FileLayout, sums: Mapping[str, int]) -> _Described:
    """Return what the manifest says of tensors: file, shape, dtype and checksum."""
    return {
        name: {
            "file": place.file,
            "shape": list(place.shape),
            "dtype": place.dtype,
            "checksum": f"{sums.get(name, 0) % MODULUS:016x}",
        }
        for name, place in layout.places.items()
    }


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


def _remove_old(root: Path, *, keep: int) -> None:
    """Remove all but the ``keep`` versions that were written last."""
    found = []
    for path in root.iterdir():  # among others what gradient workers on this host write
        with suppress(FileNotFoundError):
            if VERSION.fullmatch(path.name):
                found.append((path.stat().st_mtime_ns, path.name, path))
    for *_, path in sorted(found)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
