"""Weight versions as directories: written whole, named by version and epoch, never changed.

    <root>/v000007-e0/
      model-00000.safetensors ...   tensors under their Hugging Face names
      manifest.json                 names, shapes, dtypes, checksums, and the probe

A directory appears by an atomic rename after everything in it is on disk, so whoever sees one sees
all of it. The probe is a fixed token sequence with the log-probabilities that this version gives
it: the only way to know that a server computes with these weights is to ask it the same question.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from libra_cli.errors import WeightsError

FILE_BYTES = 2 * 1024**3
"""A file is closed once it is this large, so that files are hashed and pulled in parallel."""
WRITERS = 4
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Probe:
    """``logprobs[i]`` belongs to ``token_ids[i + 1]`` given everything before it, temperature 1."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is complete on disk."""

    name: str
    version: int
    bytes: int
    published_at: float


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    bytes: int
    sha256: str


def version_name(version: int, trainer_epoch: int) -> str:
    """The directory of a version. A restarted trainer may publish a number again, not a name."""
    return f"v{version:06d}-e{trainer_epoch}"


def probe_tokens(vocabulary: int, count: int) -> list[int]:
    """The same sequence in every process: tokens from all over the vocabulary."""
    generator = torch.Generator().manual_seed(20776)
    tokens: list[int] = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
    return tokens


def check_names(names: Iterable[str], model_dir: Path) -> None:
    """Servers load a version by the names in the model's own files, so ours must be among them.

    transformers renames or fuses tensors of some architectures while it loads them (experts of a
    mixture, for example); a version of such a model could not be loaded.
    """
    known: set[str] = set()
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            known.update(file.keys())
    unknown = sorted(set(names) - known)
    if known and unknown:
        raise WeightsError(
            f"{len(unknown)} tensors are not called so in {model_dir}, for example {unknown[0]}: "
            "transformers renames this architecture's weights, and servers could not load them"
        )


def publish(
    tensors: Iterable[tuple[str, Tensor]],
    root: Path,
    *,
    version: int,
    trainer_epoch: int,
    probe: Probe,
    keep: int,
) -> Published:
    """Write one version and remove all but the last ``keep``."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = version_name(version, trainer_epoch)
    temporary = root / f".{name}.{os.getpid()}"
    remove_unfinished(root)
    temporary.mkdir(mode=0o700)
    try:
        described, files = _write_tensors(tensors, temporary)
        manifest = {
            "version": version,
            "trainer_epoch": trainer_epoch,
            "name": name,
            "tensors": described,
            "files": {file.name: {"bytes": file.bytes, "sha256": file.sha256} for file in files},
            "probe": {"token_ids": list(probe.token_ids), "logprobs": list(probe.logprobs)},
        }
        write_durably(temporary / MANIFEST, json.dumps(manifest).encode())
        replace_directory(temporary, root / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    remove_old(root, "v*-e*", keep=keep)
    return Published(name, version, sum(file.bytes for file in files), time.time())


def _write_tensors(
    tensors: Iterable[tuple[str, Tensor]], directory: Path
) -> tuple[dict[str, object], list[_File]]:
    described: dict[str, object] = {}
    writes: list[Future[_File]] = []
    with ThreadPoolExecutor(WRITERS) as pool:
        for number, part in enumerate(_parts(tensors)):
            path = directory / f"model-{number:05d}.safetensors"
            for name, tensor in part.items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                described[name] = {
                    "shape": list(tensor.shape),
                    "dtype": dtype,
                    "file": path.name,
                }
            writes.append(pool.submit(_write_file, path, part))
        return described, [write.result() for write in writes]


def _parts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        part[name] = tensor
        size += tensor.nbytes
        if size >= FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _write_file(path: Path, part: dict[str, Tensor]) -> _File:
    save_file(part, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _File(path.name, os.fstat(file.fileno()).st_size, digest)


def write_durably(path: Path, data: bytes) -> None:
    """Write and wait for the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_directory(temporary: Path, final: Path) -> None:
    """Give a complete directory its name, and wait for the disk to know it."""
    _sync_directory(temporary)
    if final.exists():
        # A crash after the rename and before anyone heard of it; the new one is as good.
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
    """What a writer that was killed left behind; there is one writer a directory."""
    for leftover in root.glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_old(root: Path, pattern: str, *, keep: int) -> None:
    """Keep the last ``keep`` directories by time of writing."""
    found = sorted(root.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in found[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
