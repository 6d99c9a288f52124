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

What a profile lacks is computed. All-reduces: ``2 (n - 1) / n`` times the hidden states of all T
tokens over the bandwidth, and a latency, of the ``Interconnect`` between the n GPUs; profiles are
measured on one GPU with the sizes of a share, so that nothing of the others is in them. Gaps
between the kernels: 12 microseconds a layer, as in the fits for A100 and H100 that the shipped
profiles come from.

Guarantee: but for the gaps and what is computed, exact at the measured points of the grid used; a
mixture of experts is refused. Limit: a batch of sequences of unequal length is priced as one of
equal ones; nothing of the host's work is in here, nor that the slower of several GPUs holds up the
others.
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

from libra_cli.config.errors import InputError
from libra_cli.core.costs.mixtures import refuse_mixture
from libra_cli.core.types import Seconds, Tokens

BYTES = 2
"""Bytes of a bf16 number."""
TWICE = ("layernorm",)
"""Layers that a transformer block runs twice and a profile lists once."""
ONCE = ("embedding", "final_layernorm")
"""Layers that a model has once, not in every block."""
MATRICES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Matrix products of every block of a dense model; without one of them a profile is not whole."""
GAP_S: Seconds = 12e-6
"""Seconds between the kernels of one layer; assumed, see the module."""
RESERVE_GIB = 2.0
"""GiB of each GPU for activations, CUDA graphs and the communicator; chosen."""
HORIZON = 64
"""Decode steps over which a step's growth is taken as a straight line; chosen."""

Curve: TypeAlias = tuple[Sequence[float], Sequence[float]]
Point: TypeAlias = tuple[int, int, int, int]


class LayerProfileError(InputError):
    """A per-layer profile that cannot be read; says which file, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What an all-reduce between the GPUs of a server costs: seconds each, and bytes a second."""

    latency_s: Seconds
    bytes_s: float

    def all_reduce_s(self, size: float, gpus: int) -> Seconds:
        """Seconds to sum ``size`` bytes over so many GPUs, as a ring does; 0 for one."""
        if gpus == 1:
            return 0.0
        return self.latency_s + 2 * (gpus - 1) / gpus * size / self.bytes_s


INTERCONNECTS: Mapping[str, Interconnect] = {
    "pcie": Interconnect(39e-6, 25e9),
    "pcie-peer": Interconnect(12.5e-6, 36e9),
    "nvlink": Interconnect(5e-6, 90e9),
}
"""Between GPUs, by name. None is taken from a serving run.

``pcie``: through the host's memory, as between any two GPUs without NVLink unless ACS and IOMMU are
off. 39 us for 10 kB, and 12.5 GB/s of a PCIe 4.0 x16 link that carries 26 GB/s one way (two RTX
5070 Ti, github.com/sgl-project/sglang/pull/39605); a PCIe 5.0 link carries 54 GB/s (measured on RTX
PRO 6000, github.com/local-inference-lab/rtx6kpro), so 25 GB/s.
``pcie-peer``: PCIe 5.0 with peer access, both off: 12.7 us at 4 kB, 587 us at 21 MB, replayed back
to back in a CUDA graph (LLMServingSim, profiler/perf/RTXPRO6000/hardware.yaml).
``nvlink``: vLLM's own kernel between two A100, in a CUDA graph: 5 us up to 65 kB, 25 us at 2 MB,
222 us at 17 MB (aiconfigurator, custom_allreduce_perf).
"""
DEFAULT_INTERCONNECT = "pcie"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a dense decoder-only transformer's costs follow from, as in its ``config.json``."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """The number of weights, with an output layer of its own."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.inner
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
    interconnect: Interconnect = INTERCONNECTS[DEFAULT_INTERCONNECT]
    _grids: tuple[_Grid, _Grid, _Grid] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._grids = _grids(self.profile.attention)

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
        each += GAP_S + 2 * self._all_reduce_s(tokens)
        return self.overhead_s + once + self.shape.layers * each

    def _all_reduce_s(self, tokens: float) -> Seconds:
        """Seconds to sum the hidden states of so many tokens over the GPUs; a layer does it twice,
        after attention and after its MLP."""
        size = tokens * self.shape.hidden * BYTES
        return self.interconnect.all_reduce_s(size, self.tensor_parallel)


def layer_times(
    folder: Path,
    gpu: str,
    model: str,
    tensor_parallel: int,
    *,
    chunk_tokens: Tokens = 2048,
    overhead_s: Seconds = 0.0,
    interconnect: str = DEFAULT_INTERCONNECT,
) -> LayerTimes:
    """Step times of a known model on a known GPU, from its profile in ``folder``.

    ``model`` may have a publisher before it; ``interconnect`` is a name of ``INTERCONNECTS``.

    Raises:
        LayerProfileError: a model, a GPU or an interconnect that is not known, or a table that is
            missing or lacks a layer.
        MixtureRefused: the model is a mixture of experts.
    """
    name = model.rpartition("/")[2]
    refuse_mixture(name, {})
    if interconnect not in INTERCONNECTS:
        raise LayerProfileError(
            f"there is no interconnect {interconnect!r}", hint=f"one of {', '.join(INTERCONNECTS)}"
        )
    for known, what in ((MODELS, name), (GPU_GIB, gpu)):
        if what not in known:
            raise LayerProfileError(
                f"the shape of {what} is not known", hint=f"one of {', '.join(known)}"
            )
    shape = MODELS[name]
    stem = f"{gpu}_{name}_tp{tensor_parallel}"
    profile = read_layers(folder, stem)
    missing = [layer for layer in MATRICES if layer not in profile.dense]
    if missing:
        raise LayerProfileError(
            f"{folder / stem}_dense: has no {missing[0]}",
            hint="a dense model has it in every block; a mixture of experts has no price here",
        )
    return LayerTimes(
        profile=profile,
        shape=shape,
        tensor_parallel=tensor_parallel,
        kv_tokens=shape.kv_capacity(GPU_GIB[gpu], tensor_parallel),
        chunk_tokens=chunk_tokens,
        overhead_s=overhead_s,
        interconnect=INTERCONNECTS[interconnect],
    )
