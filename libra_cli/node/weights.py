"""Weight versions on disk: written once, whole or not at all, with what proves them.

    <weights_dir>/<run>/v000007-e1/
        model-00001.safetensors ...   Hugging Face names, as vLLM's reload_weights reads them
        manifest.json                 tensors, files with sha256, and the probe

The probe is a fixed sequence with the trainer's own log-probabilities for it; a server that has
loaded the version must give the same. A directory appears under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 4 * 2**30
CHUNK_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Version:
    """What the controller is told of a published version."""

    name: str
    version: int
    bytes: int
    published_at: float


def version_name(version: int, trainer_epoch: int) -> str:
    """The directory of a version, sorting by number."""
    return f"v{version:06d}-e{trainer_epoch}"


def probe_ids(vocabulary: int, count: int) -> list[int]:
    """A fixed sequence of tokens, the same for every version of a model."""
    chooser = random.Random(vocabulary)
    return [chooser.randrange(vocabulary) for _ in range(count)]


def publish(
    state: Mapping[str, Tensor],
    probe: tuple[Sequence[int], Sequence[float]],
    versions: Path,
    *,
    version: int,
    trainer_epoch: int,
    keep: int,
) -> Version:
    """Write a version, then remove all but the newest ``keep``.

    ``state`` holds CPU tensors under their Hugging Face names, in the dtype that is served.
    """
    name = version_name(version, trainer_epoch)
    staging = versions / f".{name}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o700, parents=True)
    tensors: dict[str, dict[str, object]] = {}
    for number, shard in enumerate(_shards(state), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(dict(shard), staging / file, metadata={"format": "pt"})
        for key, tensor in shard.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[key] = {"shape": list(tensor.shape), "dtype": dtype, "file": file}
    files = {path.name: _seal(path) for path in sorted(staging.glob("*.safetensors"))}
    published = Version(name, version, sum(size for size, _ in files.values()), time.time())
    manifest = {
        **asdict(published),
        "trainer_epoch": trainer_epoch,
        "tensors": tensors,
        "files": {file: {"bytes": size, "sha256": sha} for file, (size, sha) in files.items()},
        "probe": {"token_ids": list(probe[0]), "logprobs": list(probe[1])},
    }
    (staging / "manifest.json").write_text(json.dumps(manifest))
    final = versions / name
    shutil.rmtree(final, ignore_errors=True)
    staging.rename(final)
    _forget(versions, keep)
    return published


def _shards(state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for key, tensor in state.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[key] = tensor.contiguous()
        size += tensor.nbytes
    yield shard


def _seal(path: Path) -> tuple[int, str]:
    """Bytes and sha256 of a file that is now on its medium."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
        os.fsync(file.fileno())
        size = file.tell()
    return size, digest.hexdigest()


def _forget(versions: Path, keep: int) -> None:
    by_age = sorted(versions.glob("v*-e*"), key=lambda path: path.stat().st_mtime_ns)
    for old in by_age[: max(0, len(by_age) - keep)]:
        shutil.rmtree(old, ignore_errors=True)
