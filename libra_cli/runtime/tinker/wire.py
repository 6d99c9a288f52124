"""The three messages of Tinker's wire that are no JSON: what is trained on, and both large answers.

The numbers are those of ``tinker_public.proto`` as tinker 0.38 has it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from libra_cli.config.errors import LibraError
from libra_cli.runtime.tinker.protobuf import (
    Fields,
    bytes_field,
    double,
    double_field,
    integer_field,
    part,
    parts,
    read_fields,
    whole,
)

DatumOrder: TypeAlias = dict[str, Any]
"""What the training process is sent of a datum: its tokens, and each input's type and bytes."""
FLOAT32 = 1
_TYPES = {FLOAT32: "float32", 2: "int64"}


class NotServed(LibraError):
    """A request that this service does not answer; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """A request of ``forward_backward`` or ``forward``."""

    loss: str
    settings: Mapping[str, float]
    forward_only: bool
    data: Sequence[DatumOrder]


def read_turn(message: bytes) -> tuple[str, int]:
    """Return whose a training pass is, a model's id, and the number of the request.

    Raises:
        ValueError: it is no such message.
    """
    fields = read_fields(message)
    return part(fields, 1).decode(), whole(fields, 2)


def read_training_pass(message: bytes) -> TrainingPass:
    """Parse the body of a request.

    Raises:
        ValueError: it is no such message.
        NotServed: it has images or sounds, or tensors of another form than one number a token.
    """
    fields = read_fields(message)
    settings = _settings(parts(fields, 7), lambda value: part(read_fields(value), 1))
    return TrainingPass(
        loss=part(fields, 4).decode(),
        settings=settings or _settings(parts(fields, 5), bytes),
        forward_only=bool(whole(fields, 6)),
        data=[_datum(read_fields(one)) for one in parts(fields, 3)],
    )


def _settings(entries: Sequence[bytes], number: Any) -> dict[str, float]:
    read = map(read_fields, entries)
    return {part(one, 1).decode(): double(number(part(one, 2))) for one in read}


def _datum(fields: Fields) -> DatumOrder:
    tokens = b""
    for chunk in map(read_fields, parts(fields, 1)):
        if 1 not in chunk:
            raise NotServed("images and sounds are not served: a datum may have text alone")
        tokens += part(read_fields(part(chunk, 1)), 1)
    entries = map(read_fields, parts(fields, 2))
    return {
        "tokens": tokens,
        "inputs": {part(one, 1).decode(): _tensor(read_fields(part(one, 2))) for one in entries},
    }


def _tensor(fields: Fields) -> tuple[str, bytes]:
    shape = read_shape(fields.get(4, []))
    if 2 in fields or len(shape) > 1:
        raise NotServed("a tensor of a datum is a matrix: one number a token is served")
    kind = whole(fields, 3)
    if kind not in _TYPES:
        raise NotServed(f"tensors of type {kind} are not served: send float32 or int64")
    return _TYPES[kind], part(fields, 1)


def read_shape(values: Sequence[int | bytes]) -> list[int]:
    """Return the numbers of a repeated integer, which may be packed or not."""
    found: list[int] = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
        else:
            found += _varints(value)
    return found


def _varints(data: bytes) -> list[int]:
    found, value, shift = [], 0, 0
    for byte in data:
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            found.append(value)
            value = shift = 0
    return found


def write_training_output(logprobs: Sequence[bytes], metrics: Mapping[str, float]) -> bytes:
    """Return the answer to a training pass; ``logprobs`` are each datum's, of float32."""
    offsets = array("q", accumulate((len(one) for one in logprobs), initial=0))
    tensor = (
        bytes_field(1, b"".join(logprobs))
        + bytes_field(2, offsets.tobytes())
        + integer_field(3, FLOAT32)
    )
    field = bytes_field(1, b"logprobs") + bytes_field(2, tensor)
    record = bytes_field(2, field) + integer_field(3, len(logprobs))
    written = bytes_field(1, b"TorchLossReturn") + bytes_field(2, record)
    for name, value in metrics.items():
        entry = bytes_field(1, name.encode()) + double_field(2, value)
        written += bytes_field(3, entry)
    return written


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sampled sequence, in the arrays of the server that sampled it."""

    token_ids: bytes
    """The ids of its tokens, as int32."""
    logprobs: bytes
    """The log-probability of each of them in nats, as float32."""
    stopped: bool
    """Whether it ended by itself, and not where it had all the tokens that were asked for."""


def write_sample(sequences: Sequence[SampledTokens], prompt_logprobs: bytes) -> bytes:
    """Return the answer to a request of samples; ``prompt_logprobs`` are of float32, or empty."""
    written = b"".join(
        bytes_field(
            1,
            integer_field(1, 0 if one.stopped else 1)
            + bytes_field(2, one.token_ids)
            + bytes_field(3, one.logprobs),
        )
        for one in sequences
    )
    return written + (bytes_field(2, prompt_logprobs) if prompt_logprobs else b"")
