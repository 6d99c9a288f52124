"""A rank that says where it finds itself: ``python -m tests.told_ranks DIRECTORY``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object


def listens(pid: int) -> list[str]:
    """The addresses, in hexadecimal as Linux has them, at which a process listens for TCP."""
    mine = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it was the one that lists them
            mine.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        fields[1].partition(":")[0]
        for fields in lines
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine
    ]


def main() -> None:
    """Write what all ranks say into a file of this rank, and where it and its launcher listen."""
    accelerator = Accelerator()
    dist.barrier()
    listening = sorted(set(listens(os.getpid())) | set(listens(os.getppid())))
    (Path(sys.argv[1]) / f"listening-{accelerator.process_index}.json").write_text(
        json.dumps(listening), encoding="utf-8"
    )
    here = [accelerator.process_index, int(os.environ["LOCAL_RANK"]), accelerator.mixed_precision]
    told = gather_object([here])
    path = Path(sys.argv[1]) / f"{accelerator.process_index}.json"
    path.write_text(json.dumps(told), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main()
