"""Writes gradients to the files that the gradient server reads, one for each tensor and rank.

A worker of one rank writes a tensor as soon as its gradient of the last micro-batch is accumulated,
while the backward pass goes on below it, so the trainer fetches the upper layers while the lower
ones are computed. With several ranks a gradient is complete only after their collectives, and
everything is written at the end of the pass: each rank writes the rows of its shard, or its part of
the rows where ranks are replicas.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from libra_cli.node.gradient.server import FinishedGradient, GradientStore, Piece
from libra_cli.node.gradient.wire import BYTES
from libra_cli.node.model.policy import PolicyModel, local_gradient, row_count


class GradientWriter:
    """Writes one rank's gradients. Only rank 0 has a store."""

    def __init__(
        self, policy: PolicyModel, store: GradientStore | None, outbox: Path, dtype: str
    ) -> None:
        """``dtype`` is the format to write, ``float32`` or ``bfloat16``."""
        self._policy = policy
        self._dtype = dtype
        self._store = store
        self._outbox = outbox
        self._directory = outbox
        self._last_pass = False
        self._parameters = policy.parameters()
        self._files = {name: f"{number:05d}" for number, name in enumerate(self._parameters)}
        self._writer = ThreadPoolExecutor(1, "gradient-writer")
        self._writes: dict[str, Future[None]] = {}
        on_gpu = policy.device.type == "cuda"
        self._stream = torch.cuda.Stream(policy.device) if on_gpu else None
        if policy.world == 1 and not policy.sharded:  # a shard's gradient is put there by FSDP2
            for name, parameter in self._parameters.items():
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))

    def begin(self, step: int) -> None:
        """*Collective.* Remove the files of the share before, and clear the gradients."""
        self._directory = self._outbox / f"step-{step:06d}"
        self._last_pass = False
        self._writes = {}
        self._policy.clear_gradients()
        if self._store is not None:
            self.clear()
            self._directory.mkdir(mode=0o700, parents=True)
        self._policy.gather(None)  # until it is made

    def before(self, last: bool) -> None:
        """Say that the next backward pass begins; gradients are written after the last one."""
        self._last_pass = last

    def finish(self) -> None:
        """*Collective.* Write every gradient that is not written yet; returns when all are."""
        for name, parameter in self._parameters.items():
            if name not in self._writes:
                self._writes[name] = self._writer.submit(self._write, name, parameter, None)
        for write in self._writes.values():
            write.result()
        if self._policy.world > 1:
            own = {name: self._policy.own_rows(one) for name, one in self._parameters.items()}
            ranks = self._policy.gather(own)  # once the other ranks have written theirs
            if self._store is not None:
                for name, parameter in self._parameters.items():
                    self._announce(name, parameter, [rank[name] for rank in ranks])

    def clear(self) -> None:
        """Free the memory that the files take up."""
        shutil.rmtree(self._outbox, ignore_errors=True)

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if self._last_pass:
            event = None
            if self._stream is not None:
                event = torch.cuda.current_stream().record_event()
            self._writes[name] = self._writer.submit(self._write, name, parameter, event)

    def _write(self, name: str, parameter: nn.Parameter, ready: Any) -> None:
        if self._stream is None:
            self._to_file(name, self._rows(parameter))
        else:
            # Beside the kernels of the pass, which is still going on.
            with torch.cuda.stream(self._stream):
                if ready is None:
                    self._stream.wait_stream(torch.cuda.default_stream())
                else:
                    self._stream.wait_event(ready)
                self._to_file(name, self._rows(parameter))
        if self._policy.world == 1:
            self._announce(name, parameter, [(0, row_count(parameter))])

    def _rows(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's rows of the gradient, ``[rows, ...]``, cut out of a replica's."""
        gradient = local_gradient(parameter).detach()
        if isinstance(parameter, DTensor) or self._policy.world == 1:
            return gradient.contiguous()
        start, stop = self._policy.own_rows(parameter)
        return gradient.reshape(row_count(parameter), -1)[start:stop].contiguous()

    def _to_file(self, name: str, rows: Tensor) -> None:
        if self._dtype == "bfloat16":
            rows = rows.to(torch.bfloat16).view(torch.uint16)  # numpy does not know it
        rows.cpu().numpy().tofile(self._path(name, self._policy.rank))

    def _announce(self, name: str, parameter: Tensor, written: Sequence[tuple[int, int]]) -> None:
        """Offer a gradient of which each rank has written its rows, ``[start, stop)``."""
        if self._store is None:
            return
        pieces = [Piece(self._path(name, rank), *rows) for rank, rows in enumerate(written)]
        pieces.sort(key=lambda piece: (piece.start, piece.stop))  # experts go by rows of ranks
        found = FinishedGradient(tuple(parameter.shape), pieces, BYTES[self._dtype])
        self._store.finish(name, found)

    def _path(self, name: str, rank: int) -> Path:
        return self._directory / f"{self._files[name]}.{rank}"
