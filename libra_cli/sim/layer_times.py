"""Step times of a server from per-layer measurements of its kernels.

A profile is three tables of one (GPU, model, tensor-parallel degree), times in microseconds: every
dense layer by the tokens in a step, output layer and sampler by the sequences in it, attention by
(prompt tokens, their context, decoding sequences, context of each). A step is then::

    step = overhead + embedding and last norm at T + layers x (dense layers at T + attention)
           + output and sampling at the batch + layers x 2 all-reduces (T), on several GPUs

with T = batch + prompt tokens, and between measurements straight lines. Nothing is fitted. Two
things the linear law of ``costs.server`` does not have show up here: dense layers with their
real steps, and that a prompt chunk in a step slows the attention of the sequences decoding beside
it, as both then run in one kernel: in batches of 16 and more with 32 thousand tokens of KV, to 1.6
times at the median for Llama-3.1-8B and 2.9 for Qwen3-32B.

What a profile lacks is computed from the model's shape. Experts: the weights touched are read at
the speed the output layer's are, and multiplied at that of the dense layers, half of the shorter
of the two under the longer; a step of T tokens touches ``E (1 - (1 - k / E)^T)`` of E experts if
each takes k at random. All-reduces: a measured latency and bandwidth. Gaps between the kernels: 12
microseconds a layer, as in the fits for A100 and H100 that the shipped profiles come from.

Guarantee: but for the gaps and what is computed, exact at the measured points of the grid used.
Limit: a batch of sequences of unequal length is priced as one of equal ones; real routing favours
some experts, so that a batch touches fewer of them; nothing of the host's work is in here.
"""

from __future__ import annotations

import csv
import gzip
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TypeAlias

from libra_cli.config.errors import LibraError
from libra_cli.core.types import Seconds, Tokens

BYTES = 2
"""Bytes of a bf16 number."""
TWICE = ("layernorm",)
"""Layers that a transformer block runs twice and a profile lists once."""
ONCE = ("embedding", "final_layernorm")
"""Layers that a model has once, not in every block."""
ALL_REDUCE_S: Seconds = 12.5e-6
ALL_REDUCE_BYTES_S = 36e9
"""NCCL between two GPUs over PCIe 5.0 x16: 12.7 us at 4 kB, 587 us at 21 MB, as published by
LLMServingSim (profiler/perf/RTXPRO6000/hardware.yaml, measured apart from any serving run)."""
GAP_S: Seconds = 12e-6
"""Seconds between the kernels of one layer; assumed, see the module."""
EXPERT_S: Seconds = 30e-6
"""Routing, sorting and launching of one mixture layer, whatever is in it (the same source: 27 us
for one token and one expert). From 16 tokens on, and as many experts as random routing touches, the
law of experts here is within 6 % of the block times published there for Qwen3-30B-A3B; one token is
68 % too dear (81 against 48 us a layer)."""
RESERVE_GIB = 2.0
"""GiB of each GPU for activations, CUDA graphs and the communicator; chosen."""
HORIZON = 64
"""Decode steps over which a step's growth is taken as a straight line; chosen."""

Curve: TypeAlias = tuple[Sequence[float], Sequence[float]]
Point: TypeAlias = tuple[int, int, int, int]


class LayerProfileError(LibraError):
    """A per-layer profile that cannot be read; says which file, and what is wrong with it."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder-only transformer's costs follow from; sizes as in its ``config.json``.

    ``expert_hidden`` is the inner width of one expert, ``active`` the experts a token takes.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int
    experts: int = 0
    active: int = 0
    expert_hidden: int = 0

    @property
    def parameters(self) -> int:
        """The number of weights, with an output layer of its own."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.inner
        if self.experts:
            mlp = self.experts * (3 * self.hidden * self.expert_hidden + self.hidden)
        return self.layers * (attention + mlp) + 2 * self.vocabulary * self.hidden

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV cache of one token, over all GPUs."""
        return self.layers * 2 * self.kv_heads * self.head * BYTES

    def kv_capacity(self, gpu_gib: float, tensor_parallel: int, utilisation: float = 0.9) -> Tokens:
        """Tokens a server's KV cache holds: what weights and a reserve leave of its share.

        Raises LayerProfileError where the weights alone do not fit.
        """
        room = (gpu_gib * utilisation - RESERVE_GIB) * 2**30 * tensor_parallel
        tokens = int((room - self.parameters * BYTES) // self.kv_token_bytes)
        if tokens < 1:
            weights = self.parameters * BYTES / 2**30
            raise LayerProfileError(
                f"{weights:.0f} GiB of weights do not fit {tensor_parallel} GPUs "
                f"of {gpu_gib:g} GiB",
                hint="use more GPUs a server",
            )
        return tokens


MODELS: Mapping[str, ModelShape] = {
    "Llama-3.1-8B": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
    "Qwen3-8B": ModelShape(36, 4096, 32, 8, 128, 12288, 151936),
    "Qwen3-14B": ModelShape(40, 5120, 40, 8, 128, 17408, 151936),
    "Qwen3-32B": ModelShape(64, 5120, 64, 8, 128, 25600, 151936),
    "Qwen3-30B-A3B-Instruct-2507": ModelShape(
        48, 2048, 32, 4, 128, 6144, 151936, experts=128, active=8, expert_hidden=768
    ),
}
GPU_GIB: Mapping[str, float] = {"RTXPRO6000": 94.97}
"""GiB of memory that the driver reports, by the name a profile's file begins with."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The three tables, in seconds. ``dense`` and ``per_sequence`` map a layer to its curve."""

    dense: Mapping[str, Curve]
    per_sequence: Mapping[str, Curve]
    attention: Mapping[Point, Seconds]


def read_layers(folder: Path, stem: str) -> LayerProfile:
    """Read ``<stem>_dense.csv.gz``, ``_per_sequence`` and ``_attention`` (or plain ``.csv``).

    Raises LayerProfileError for a file that is missing or not such a table.
    """
    attention = {}
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    for chunk, context, batch, kv, time in _rows(folder, f"{stem}_attention", columns):
        attention[(int(chunk), int(context), int(batch), int(kv))] = float(time) * 1e-6
    return LayerProfile(
        dense=_curves(folder, f"{stem}_dense", "tokens"),
        per_sequence=_curves(folder, f"{stem}_per_sequence", "sequences"),
        attention=attention,
    )


def _curves(folder: Path, stem: str, by: str) -> dict[str, Curve]:
    points: dict[str, dict[float, float]] = {}
    for layer, size, time in _rows(folder, stem, ("layer", by, "time_us")):
        points.setdefault(layer, {})[float(size)] = float(time) * 1e-6
    return {
        layer: (sorted(curve), [curve[size] for size in sorted(curve)])
        for layer, curve in points.items()
    }


def _rows(folder: Path, stem: str, columns: Sequence[str]) -> list[list[str]]:
    path = folder / f"{stem}.csv.gz"
    if not path.exists():
        path = folder / f"{stem}.csv"
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = [[row[column] for column in columns] for row in csv.DictReader(_lines(text))]
        for row in rows:
            float(row[-1])
    except (OSError, EOFError) as error:
        raise LayerProfileError(f"{path}: cannot be read: {error}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise LayerProfileError(f"{path}: not a table of {', '.join(columns)}: {error}") from error
    if not rows:
        raise LayerProfileError(f"{path}: has no rows")
    return rows


def _lines(text: bytes) -> list[str]:
    return text.decode().splitlines()


def between(curve: Curve, at: float) -> float:
    """The value on the line between its neighbours, or on the last lines' beyond the ends."""
    sizes, values = curve
    if len(sizes) == 1:
        return values[0]
    index, share = _cell(sizes, at)
    return values[index] + share * (values[index + 1] - values[index])


def _cell(axis: Sequence[float], at: float) -> tuple[int, float]:
    index = min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)
    return index, (at - axis[index]) / (axis[index + 1] - axis[index])


@dataclass(frozen=True, slots=True)
class _Grid:
    """A full grid of attention times, read with straight lines along each axis."""

    axes: tuple[tuple[int, ...], ...]
    values: Mapping[tuple[int, ...], Seconds]

    def at(self, *where: float) -> Seconds:
        """Seconds at a point of the grid; below the first point of an axis those of that point."""
        corners = []
        for axis, place in zip(self.axes, where, strict=True):
            index, share = _cell(axis, max(place, axis[0]))
            corners.append(((axis[index], 1 - share), (axis[index + 1], share)))
        total = 0.0
        for corner in product(*corners):
            weight = 1.0
            for _, share in corner:
                weight *= share
            if weight:
                total += weight * self.values[tuple(place for place, _ in corner)]
        return total


def _doubling(values: set[int]) -> tuple[int, ...]:
    """Powers of two and 0: the profiles' common grid (the rest lies on one of its own)."""
    return tuple(sorted(value for value in values if value & (value - 1) == 0))


def _grids(attention: Mapping[Point, Seconds]) -> tuple[_Grid, _Grid, _Grid]:
    """Of pure decode, of pure prefill, and of both together.

    Raises LayerProfileError where the grid of powers of two has fewer than two points a side.
    """
    decode = {(n, kv): s for (c, _, n, kv), s in attention.items() if not c}
    prefill = {(c, k): s for (c, k, n, _), s in attention.items() if not n}
    mixed = {p: s for p, s in attention.items() if p[0] and p[2]}
    grids = []
    for points in (decode, prefill, mixed):
        sides = zip(*points, strict=True)
        axes = tuple(_doubling(set(side)) for side in sides)
        values = {tuple(p): points[p] for p in product(*axes) if p in points}  # type: ignore[index]
        whole = 1
        for axis in axes:
            whole *= len(axis) if len(axis) > 1 else 0
        if not whole or len(values) != whole:
            raise LayerProfileError("the attention table has no full grid of powers of two")
        grids.append(_Grid(axes, values))
    return grids[0], grids[1], grids[2]


@dataclass(slots=True)
class LayerTimes:
    """Step times of one server, from its profile; what ``sim.engine.Engine`` asks for.

    ``overhead_s`` is added to every step.
    """

    profile: LayerProfile
    shape: ModelShape
    tensor_parallel: int
    kv_tokens: Tokens
    chunk_tokens: Tokens = 2048
    overhead_s: Seconds = 0.0
    _grids: tuple[_Grid, _Grid, _Grid] = field(init=False, repr=False)
    _read_s: Seconds = field(init=False, repr=False)
    _multiply_s: Seconds = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._grids = _grids(self.profile.attention)
        shape = self.shape
        sizes, times = self.profile.per_sequence["lm_head"]
        output = shape.vocabulary * shape.hidden / self.tensor_parallel
        # Seconds to read a weight, and to multiply one token by it.
        self._read_s = times[0] / output
        sizes, times = self.profile.dense["qkv_proj"]
        weights = shape.hidden * shape.head * (shape.heads + 2 * shape.kv_heads)
        self._multiply_s = times[-1] / sizes[-1] / (weights / self.tensor_parallel)

    def decode_line(self, batch: int, kv_tokens: Tokens) -> tuple[Seconds, Seconds, int]:
        """Time of the next decode step, its growth a step, and for how many steps that holds."""
        now = self.decode_step_s(batch, kv_tokens)
        later = self.decode_step_s(batch, kv_tokens + HORIZON * batch)
        return now, max(0.0, later - now) / HORIZON, HORIZON

    def decode_step_s(self, batch: float, kv_tokens: float) -> Seconds:
        """Seconds of one step that decodes ``batch`` sequences holding ``kv_tokens`` in all."""
        return self._around_s(batch, batch) + self.shape.layers * self._grids[0].at(
            batch, kv_tokens / max(batch, 1)
        )

    def mixed_step_s(
        self,
        batch: float,
        kv_tokens: float,
        chunk: int,
        chunk_context: float,
        requests: int = 0,
    ) -> Seconds:
        """Seconds of one step: a decode batch, and ``chunk`` tokens after ``chunk_context``."""
        prompts, both = self._grids[1], self._grids[2]
        context = max(0.0, chunk_context)
        attention = alone = prompts.at(chunk, context)
        if chunk_context < 0:
            # Several short prompts, whose mean context is "before 0": shorter chunks, one launch.
            short = max(1.0, chunk + 2 * chunk_context)
            launch = prompts.at(0, 0)
            attention = min(alone, launch + (prompts.at(short, 0) - launch) * chunk / short)
        if batch:
            attention += max(0.0, both.at(chunk, context, batch, kv_tokens / batch) - alone)
        return self._around_s(batch + chunk, batch) + self.shape.layers * attention

    def _around_s(self, tokens: float, sequences: float) -> Seconds:
        """Seconds of a step without its attention."""
        once = each = 0.0
        for layer, curve in self.profile.dense.items():
            time = between(curve, max(tokens, 1.0))
            if layer in ONCE:
                once += time
            else:
                each += 2 * time if layer in TWICE else time
        for curve in self.profile.per_sequence.values():
            once += between(curve, max(sequences, 1.0))
        each += GAP_S + self._experts_s(tokens) + self._all_reduce_s(tokens)
        return self.overhead_s + once + self.shape.layers * each

    def _experts_s(self, tokens: float) -> Seconds:
        shape = self.shape
        if not shape.experts:
            return 0.0
        expert = 3 * shape.hidden * shape.expert_hidden / self.tensor_parallel
        untouched = float((1 - shape.active / shape.experts) ** tokens)
        read = shape.experts * (1 - untouched) * expert * self._read_s
        multiply = tokens * shape.active * expert * self._multiply_s
        return EXPERT_S + max(read, multiply) + min(read, multiply) / 2

    def _all_reduce_s(self, tokens: float) -> Seconds:
        """Seconds of a layer's two sums of hidden states over the GPUs."""
        if self.tensor_parallel == 1:
            return 0.0
        moved = 2 * (self.tensor_parallel - 1) / self.tensor_parallel
        sent = moved * tokens * self.shape.hidden * BYTES
        return 2 * (ALL_REDUCE_S + sent / ALL_REDUCE_BYTES_S)


def layer_times(
    folder: Path,
    gpu: str,
    model: str,
    tensor_parallel: int,
    *,
    chunk_tokens: Tokens = 2048,
    overhead_s: Seconds = 0.0,
) -> LayerTimes:
    """Step times of a known model on a known GPU, from its profile in ``folder``.

    ``model`` may have a publisher before it. Raises LayerProfileError for a model or GPU whose
    shape is not known, and where a table is missing.
    """
    name = model.rpartition("/")[2]
    for known, what in ((MODELS, name), (GPU_GIB, gpu)):
        if what not in known:
            raise LayerProfileError(
                f"the shape of {what} is not known", hint=f"one of {', '.join(known)}"
            )
    shape = MODELS[name]
    return LayerTimes(
        profile=read_layers(folder, f"{gpu}_{name}_tp{tensor_parallel}"),
        shape=shape,
        tensor_parallel=tensor_parallel,
        kv_tokens=shape.kv_capacity(GPU_GIB[gpu], tensor_parallel),
        chunk_tokens=chunk_tokens,
        overhead_s=overhead_s,
    )
