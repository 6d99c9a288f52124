"""A host's member of the process groups that weight versions travel by, as a process of its agent.

    python -m libra_cli.node.fabric.member

It reads orders from its standard input, a line of JSON each, and ends when that ends. A process of
its own, so that a group that hangs or breaks takes neither a server nor the trainer with it.

    join     interface, rank, size     address: where this rank listens, in base64
    connect  addresses                 {}: this rank can reach all others
    send     directory, addresses      {}: the next rank has the version in this directory
    receive  directory, addresses      {}: the files that its manifest lists are here; before that
                                       a line {chunk: [file, index]} for each chunk that is right

The answer is a line of JSON, ``error`` in it if the order failed. ``addresses`` are those of all
ranks, and end the joining. Every chunk is compared with its digest in the manifest, which has come
from the publisher over TLS. A chunk that is wrong is passed on and not told.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from libra_cli.node.fabric.chain import Relay, receive, send
from libra_cli.node.fabric.group import STALL_S, HostGroup
from libra_cli.node.weights.chunks import CHUNK_BYTES, MANIFEST, ListedFile, read_manifest
from libra_cli.node.weights.digests import digest_of

POPULATE_WRITE = 23
"""The number of ``MADV_POPULATE_WRITE`` in madvise(2)."""
JOIN_S = 2 * STALL_S
"""Seconds that a rank waits for the addresses of the others."""


class Member:
    """This host's rank in the newest group, and what it still passes on in the one before."""

    def __init__(self, answers: IO[str]) -> None:
        """Write answers to ``answers``."""
        self._answers = answers
        self._group: HostGroup | None = None
        self._relay: Relay | None = None

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order and return its answer; see the head of this module.

        Raises:
            ValueError: there is no such order, or no group was joined.
            Exception: it failed.
        """
        match order["op"]:
            case "join":
                return {"address": self._join(order["interface"], order["rank"], order["size"])}
            case "connect":
                self._connected(order["addresses"])
                return {}
            case "send":
                self._send(Path(order["directory"]), order["addresses"])
                return {}
            case "receive":
                self._receive(Path(order["directory"]), order["addresses"])
                return {}
            case other:
                raise ValueError(f"no order {other!r}")

    def tell(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def _join(self, interface: str, rank: int, size: int) -> str:
        if self._relay is not None:
            self._relay.join()
            self._relay = None
        self._group = HostGroup(interface, rank, size, patience_s=JOIN_S)
        return b64encode(self._group.address()).decode()

    def _connected(self, addresses: Sequence[str]) -> tuple[Any, int, int]:
        """Connect the group that was joined, and let it go after this transfer."""
        joined, self._group = self._group, None
        if joined is None:
            raise ValueError("no group was joined")
        group = joined.connect([b64decode(one) for one in addresses])
        return group, joined.rank, joined.size

    def _send(self, directory: Path, addresses: Sequence[str]) -> None:
        group, rank, _ = self._connected(addresses)
        send(group, rank + 1, [block for *_, block in blocks(directory, writable=False)])

    def _receive(self, directory: Path, addresses: Sequence[str]) -> None:
        group, rank, size = self._connected(addresses)
        listed = [*blocks(directory, writable=True)]
        tensors = [block for *_, block in listed]
        threading.Thread(target=_populate, args=[tensors], name="pages", daemon=True).start()
        relay = Relay(group, rank + 1, tensors) if rank + 1 < size else None
        self._relay = relay

        def came(number: int) -> None:
            if relay is not None:
                relay.came(number + 1)
            name, index, file, block = listed[number]
            if digest_of(file.algorithm, memoryview(block.numpy())) == file.digests[index]:
                self.tell({"chunk": [name, index]})

        try:
            receive(group, rank - 1, tensors, came)
        finally:
            if relay is not None:
                relay.end()


def _populate(blocks: Sequence[Tensor]) -> None:
    """Have the kernel give memory to blocks of new files, ahead of what comes.

    Else gloo's one thread waits for each page as it first writes there. Where the kernel does not
    know how (Linux before 5.14) it says so, and that is what happens.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for block in blocks:
        if madvise(
            ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(block.numel()), POPULATE_WRITE
        ):
            return


def blocks(directory: Path, *, writable: bool) -> Iterator[tuple[str, int, ListedFile, Tensor]]:
    """Map the files of a version's directory: file, index, what is listed, and bytes of each chunk.

    Raises:
        OSError, ManifestError: they cannot be read.
    """
    manifest = read_manifest((directory / MANIFEST).read_bytes())
    for name, file in sorted(manifest.files.items()):
        if not file.bytes:
            continue
        path = str(directory / name)
        mapped = torch.from_file(path, shared=writable, size=file.bytes, dtype=torch.uint8)
        for index, block in enumerate(mapped.split(CHUNK_BYTES)):
            yield name, index, file, block


def main() -> None:
    """Carry out the orders that come until there are no more."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    member = Member(answers)
    for line in sys.stdin:
        try:
            answer = member.obey(json.loads(line))
        except Exception as error:  # noqa: BLE001  the agent must hear of any failure
            answer = {"error": _words(error)}
        member.tell(answer)
    os._exit(0)  # gloo's threads may wait for ranks that are gone


def _words(error: Exception) -> str:
    """What happened, without the place in gloo's source and its advice."""
    told = re.sub(r"^\[\S*gloo/\S+\] ", "", str(error).partition(". This is typically")[0])
    return f"{type(error).__name__}: {told}"


if __name__ == "__main__":
    main()
