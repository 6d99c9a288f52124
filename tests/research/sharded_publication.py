"""What a version costs the ranks of one host that hold its shards: memory and time of a core.

    python -m tests.research.sharded_publication --ranks 4 --layers 2 8 --ways gathered rows

publishes so many layers of Qwen3-1.7B's shapes and its embedding, random and sharded by rows over
gloo, twice, and prints a line for every size and both ways: with ``rows`` the first ``--writers``
write the rows that they hold and those that the others send them, with ``gathered`` every tensor is
gathered for the one rank that writes it. A line has the bytes of the version; the most of rank 0's
memory that is not a file's (``anonymous_mb``) above what it was before, of which ``copy_mb`` is the
copy that is kept; the seconds that a trainer stands still for the second version, in which one
number of a hundred has changed, and until it is complete; and seconds of a core that all ranks took
for a GB of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from libra_cli.node.batch.shares import rows_of
from libra_cli.node.model.shard_rows import RowExchange
from libra_cli.node.weights.part_writer import PartWriter
from libra_cli.node.weights.parts import Share
from libra_cli.node.weights.publisher import Publisher
from libra_cli.node.weights.tensor_rows import TensorRows, whole
from libra_cli.node.weights.versions import ProbeResult
from tests.ranks import in_ranks
from tests.research.weight_publication import shapes

PROBE = ProbeResult([1, 2], [-1.0])
LOOK_S = 0.002


class Shards:
    """One rank's rows of a model's masters in float32."""

    def __init__(self, layers: int, rank: int, ranks: int, writers: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        self._rank, self._ranks = rank, ranks
        self._exchange = RowExchange(rank, ranks, writers, torch.bfloat16)
        self._tensors: dict[str, DTensor] = {}
        for name, shape in shapes(layers).items():
            first, end = self._rows(shape)
            rows = torch.empty((end - first, *shape[1:])).uniform_(-0.1, 0.1)
            self._tensors[name] = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)

    def _rows(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return rows_of(shape[0], rank=self._rank, world=self._ranks)

    def change(self) -> None:
        """Take a step after which about one number of a hundred is another in bfloat16."""
        for one in self._tensors.values():
            one.to_local().mul_(1 + 3e-5)

    def rows(self) -> Iterator[TensorRows]:
        for name, one in self._tensors.items():
            yield from self._exchange.rows_of(name, one)

    def gathered(self) -> Iterator[TensorRows]:
        return whole(self._whole())

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, one in self._tensors.items():
            yield name, one.to(torch.bfloat16).full_tensor()


class Anonymous:
    """The most memory of this process that is no file's, while it is looked at."""

    def __init__(self) -> None:
        self.before = self.most = self._now()
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def stop(self) -> float:
        """MB more than at first."""
        self._over.set()
        return (self.most - self.before) / 1e6

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
        raise OSError("the kernel does not say RssAnon")


class Writer:
    """What a rank has for versions: rank 0 a publisher, others a part or nothing."""

    def __init__(self, rank: int, writers: int, root: Path) -> None:
        self.bytes: list[int] = []
        share = Share(rank, writers)
        options: dict[str, Any] = {"trainer_incarnation": 0, "dtype": torch.bfloat16}
        self._first = self._part = None
        if rank == 0:
            self._first = Publisher(
                root,
                keep=2,
                published=lambda version: self.bytes.append(version.bytes),
                failed=list[BaseException]().append,
                share=share,
                **options,
            )
        elif rank < writers:
            self._part = PartWriter(root, share=share, **options)

    def stage(self, rows: Iterator[TensorRows], version: int) -> None:
        if self._first is not None:
            self._first.stage(rows, version=version, probe=PROBE)
        elif self._part is not None:
            self._part.stage(rows, version=version)
        else:
            for _ in rows:
                pass

    def wait(self) -> None:
        if self._first is not None:
            self._first.wait()

    def close(self) -> None:
        for one in (self._first, self._part):
            if one is not None:
                one.close()


def publish_on_rank(
    rank: int, ranks: int, writers: int, layers: int, way: str, root: str
) -> dict[str, Any]:
    """Publish two versions on this rank; what they cost it."""
    dist.init_process_group("gloo")
    shards = Shards(layers, rank, ranks, writers)
    writer = Writer(rank, writers, Path(root))
    dist.barrier()
    memory = Anonymous()
    still_s = whole_s = used_s = 0.0
    for version in range(2):
        shards.change()
        dist.barrier()
        began, used = time.monotonic(), time.process_time()
        writer.stage(shards.rows() if way == "rows" else shards.gathered(), version)
        still_s = time.monotonic() - began
        writer.wait()
        dist.barrier()
        whole_s, used_s = time.monotonic() - began, time.process_time() - used
    size = sum(writer.bytes[:1])
    told = {
        "anonymous_mb": round(memory.stop()),
        "copy_mb": round(size / writers / 1e6),
        "still_s": round(still_s, 2),
        "whole_s": round(whole_s, 2),
        "used_s": used_s,
        "bytes": size,
    }
    writer.close()
    dist.destroy_process_group()
    return told


def measure(ranks: int, writers: int, layers: int, way: str, root: Path) -> dict[str, Any]:
    """One size, one way."""
    root.mkdir(parents=True)
    hosts = [root / "host"] * ranks
    arguments = [(rank, ranks, writers, layers, way, str(root / "run")) for rank in range(ranks)]
    try:
        told = in_ranks(hosts, publish_on_rank, arguments)
    finally:
        shutil.rmtree(root)
    first = told[0]
    used_s = sum(one.pop("used_s") for one in told)
    return {"way": way, **first, "cpu_s_gb": round(used_s / first["bytes"] * 1e9, 2)}


def main() -> None:
    """Measure every size both ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--writers", type=int, help="all of them, if it is not said")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--ways", nargs="+", default=["gathered", "rows"])
    parser.add_argument("--directory", default="/dev/shm/libra-measured")
    given = parser.parse_args()
    for layers in given.layers:
        for way in given.ways:
            told = measure(
                given.ranks, given.writers or given.ranks, layers, way, Path(given.directory)
            )
            sys.stdout.write(json.dumps({"layers": layers, **told}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
