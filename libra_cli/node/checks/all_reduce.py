"""One rank of an all-reduce between hosts, over the interface that the trainer will use.

    python -m libra_cli.node.checks.all_reduce gloo|nccl RANK RANKS ADDRESS PORT BYTES

The interface is in the environment, as it is for the trainer. Rank 0 prints JSON: the seconds of
one all-reduce of so many bytes, best of ``ROUNDS``.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from libra_cli.node.rendezvous import store_at

ROUNDS = 3
MEET_S = 40.0
"""How long the ranks may take to find one another, and an all-reduce may take."""


def all_reduce(backend: str, rank: int, ranks: int, place: tuple[str, int], size: int) -> float:
    """Seconds of an all-reduce of ``size`` bytes. Raises RuntimeError for a wrong sum."""
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    limit = timedelta(seconds=MEET_S)
    store = store_at(*place, ranks, rank == 0, limit)
    dist.init_process_group(backend, timeout=limit, world_size=ranks, rank=rank, store=store)
    seconds = []
    try:
        for _ in range(ROUNDS):
            values = torch.full((size // 4,), rank + 1.0, device=device)
            dist.barrier()
            began = time.monotonic()
            dist.all_reduce(values)
            total = values.sum().item()  # waits for the GPU
            seconds.append(time.monotonic() - began)
            if total != values.numel() * ranks * (ranks + 1) / 2:
                raise RuntimeError(f"the sum over {ranks} ranks came out wrong")
    finally:
        dist.destroy_process_group()
    return min(seconds)


def main(arguments: list[str]) -> None:
    """Run the rank that the command line describes; rank 0 prints the seconds."""
    backend, rank, ranks, address, port, size = arguments
    took = all_reduce(backend, int(rank), int(ranks), (address, int(port)), int(size))
    if int(rank) == 0:
        sys.stdout.write("\n" + json.dumps({"seconds": took}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
