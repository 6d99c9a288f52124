"""Values that ranks of one world tell each other, as bytes and tensors: never as a pickle.

Whoever unpickles what comes runs whatever its sender says. Here a value becomes msgpack, of which
the tensors and large arrays are left out and sent as they are. What msgpack lacks is an extension:
tuples, frozen sets, arrays, and dataclasses of this package that are imported here already; nothing
else can be named.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from libra_cli.config.errors import TrainerError

OURS = "libra_cli."
TUPLE, FROZENSET, ARRAY, TENSOR, DATACLASS, LARGE_ARRAY = range(1, 7)
"""Codes of msgpack's extension types for what it has no form of."""
LARGE_BYTES = 256 * 1024
"""Arrays from this size on are sent as tensors are: an extension, which a batch is one of, holds
4 GiB at most, and routes of experts are more. Each costs a message, so that small ones stay in."""


def encode(value: object) -> tuple[bytes, list[Tensor]]:
    """A value's bytes, and the tensors that they have only the places of, in order.

    Raises:
        TypeError: a part of it is of a type that has no form here.
    """
    tensors: list[Tensor] = []

    def other(part: object) -> object:
        if isinstance(part, Tensor):
            tensors.append(part)
            told = [str(part.dtype).removeprefix("torch."), list(part.shape)]
            return msgpack.ExtType(TENSOR, pack(told))
        if isinstance(part, np.ndarray) and part.nbytes >= LARGE_BYTES:
            # A copy, as torch writes to what it shares, and arrays of a batch are read-only.
            tensors.append(torch.from_numpy(np.array(part, order="C").reshape(-1).view(np.uint8)))
            return msgpack.ExtType(LARGE_ARRAY, pack([part.dtype.str, list(part.shape)]))
        if isinstance(part, Mapping):
            return dict(part)
        if isinstance(part, np.generic):
            return part.item()
        kind, parts = _parts(part)
        return msgpack.ExtType(kind, pack(parts))

    def pack(part: object) -> bytes:
        return bytes(msgpack.packb(part, default=other, strict_types=True))

    return pack(value), tensors


def _parts(value: object) -> tuple[int, list[object]]:
    """The extension of a value, and what it is made of."""
    if isinstance(value, tuple):
        return TUPLE, list(value)
    if isinstance(value, frozenset):
        return FROZENSET, list(value)
    if isinstance(value, np.ndarray):
        return ARRAY, [value.dtype.str, list(value.shape), value.tobytes()]
    if is_dataclass(value) and type(value).__module__.startswith(OURS):
        name = [type(value).__module__, type(value).__qualname__]
        return DATACLASS, [*name, *(getattr(value, one.name) for one in fields(value))]
    raise TypeError(f"{type(value).__name__} has no form in which other ranks are told it")


def decode(data: bytes) -> tuple[Any, list[Tensor]]:
    """A value, and the tensors in it, whose numbers are still to come, in order.

    Raises:
        TrainerError: it names what it must not.
    """
    tensors: list[Tensor] = []

    def made(kind: int, raw: bytes) -> object:
        parts = unpack(raw)
        if kind == TENSOR:
            tensors.append(_empty(*parts))
            return tensors[-1]
        if kind == LARGE_ARRAY:
            array = np.empty(parts[1], dtype=parts[0])
            tensors.append(torch.from_numpy(array.reshape(-1).view(np.uint8)))
            return array
        return _made(kind, parts)

    def unpack(raw: bytes) -> Any:
        return msgpack.unpackb(raw, ext_hook=made, strict_map_key=False)

    return unpack(data), tensors


def _made(kind: int, parts: list[Any]) -> object:
    if kind == TUPLE:
        return tuple(parts)
    if kind == FROZENSET:
        return frozenset(parts)
    if kind == ARRAY:
        dtype, shape, data = parts
        return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
    if kind == DATACLASS:
        module, name, *values = parts
        return _dataclass(module, name)(*values)
    raise TrainerError(f"another rank sent an extension {kind}, which there is not")


def _dataclass(module: str, name: str) -> Any:
    found = getattr(sys.modules.get(module), name, None) if module.startswith(OURS) else None
    if not isinstance(found, type) or not is_dataclass(found):
        raise TrainerError(f"another rank named {module}.{name}, which is no dataclass of ours")
    return found


def _empty(dtype: str, shape: list[int]) -> Tensor:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise TrainerError(f"another rank sent a tensor of {dtype!r}, which is no number format")
    return torch.empty(shape, dtype=found)


def broadcast(value: object, group: dist.ProcessGroup) -> Any:
    """*Collective.* Return rank 0's value; the others' are ignored. Tensors come on the CPU."""
    is_source = dist.get_rank() == 0
    data, tensors = encode(value) if is_source else (b"", [])
    sent = torch.frombuffer(bytearray(_spread(data, group)), dtype=torch.uint8)
    dist.broadcast(sent, src=0, group=group)
    if not is_source:
        value, tensors = decode(sent.numpy().tobytes())
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous() if is_source else tensor
        dist.broadcast(_bytes_of(flat), src=0, group=group)
    return value


def _spread(data: bytes, group: dist.ProcessGroup) -> bytes:
    """*Collective.* Rank 0's bytes on it, and as many zeros on the others."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0, group=group)
    return data or bytes(int(size))


def gather(value: object, group: dist.ProcessGroup) -> list[Any]:
    """*Collective.* Return every rank's value, in rank order. Tensors come on the CPU."""
    data, tensors = encode(value)
    whole = b"".join([data, *(_bytes_of(one.detach().cpu()).numpy().tobytes() for one in tensors)])
    sizes = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data), len(whole)]), group=group)
    longest = max(int(one[1]) for one in sizes)
    given = torch.frombuffer(bytearray(whole.ljust(longest, b"\0")), dtype=torch.uint8)
    found = [torch.empty_like(given) for _ in sizes]
    dist.all_gather(found, given, group=group)
    return [
        _filled(bytes(one[:end].numpy()), head)
        for one, (head, end) in zip(found, (size.tolist() for size in sizes), strict=True)
    ]


def _filled(whole: bytes, head: int) -> Any:
    value, tensors = decode(whole[:head])
    for tensor in tensors:
        flat = _bytes_of(tensor)
        if flat.numel():
            data = bytearray(whole[head : head + flat.numel()])
            flat.copy_(torch.frombuffer(data, dtype=torch.uint8))
        head += flat.numel()
    return value


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
