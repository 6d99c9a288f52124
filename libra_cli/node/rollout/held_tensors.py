"""Tells which parts of which published tensors a vLLM worker holds, and their checksums.

vLLM holds the tensors of a model in other shapes than they are published in: query, key and value
projections are one parameter, so are the gate and up projections; a tensor-parallel rank has a part
of the rows of these, of the columns of the projections after them, and of the vocabulary, which is
padded; a tied output layer is the embedding. ``parts_of`` undoes that, from the layers' own account
of their ranks.

Every part is read where the kernels read it. vLLM's CPU kernels keep a packed copy of a matrix and
drop the matrix itself: such a copy is multiplied by blocks of the identity, which gives its columns
back exactly, since every other product is zero. The experts of mixtures are ``held_experts``,
convolutions ``held_convolutions``, layers that vLLM quantizes ``quantized_weights``.

Modules are called otherwise than the published tensors where the language model is a part of
another: vLLM's own mapping of the files' names to its modules' says how (``own_names``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from libra_cli.node.rollout import held_convolutions, held_experts, quantized_weights
from libra_cli.node.rollout.held_experts import Block
from libra_cli.node.rollout.number_formats import NumberFormat
from libra_cli.node.weights.checksum import FORMATS, MODULUS, as_rows, checksum_of

IDENTITY_ROWS = 512
"""Columns of a packed matrix that are read back at a time."""
USUAL: Mapping[str, list[str]] = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""What vLLM packs into one layer where its class does not say so, as those of MTP layers."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows of a layer's parameters from ``first`` on, as a part of a published layer.

    ``name`` is the published layer's; ``rows`` are where these begin and end in it, None if
    it has all; ``column`` is its first column there.
    """

    name: str
    first: int
    rows: tuple[int, int] | None = None
    column: int = 0

    @property
    def held(self) -> slice:
        """The rows of the layer's own parameters in which these are."""
        first, end = self.rows or (0, 0)
        return slice(self.first, self.first + end - first)


def held_parts(model: nn.Module, dtypes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Describe all that a worker holds of the published tensors, by name: ``dtypes`` has theirs.

    Each has the published ``name``, the ``source`` (the module it was found in), a region of the
    published tensor, and ``checksum``; or ``problem``, if the numbers held cannot be those.
    """
    packed = _packed_parts(model)
    own = own_names(model, dtypes)
    head_dtype = _head_dtype(model)
    named = model.named_parameters(remove_duplicate=False)
    tied = {id(parameter): own[name] for name, parameter in named if name in own}
    parts = []
    for path, module in model.named_modules():
        if why := _unreadable(module):
            parts.append({"name": path, "source": path, "problem": f"{path}: {why}"})
            continue
        for name, blocks in _of_module(path, module, packed, own, head_dtype):
            name = own.get(name, "")
            if not name:  # a tied one is published under the other's name
                name = tied.get(id(getattr(module, "weight", None)), "")
            if name:
                parts.append(_part(name, path, blocks, dtypes[name]))
    return parts


def _unreadable(module: nn.Module) -> str:
    """Return why the numbers that a module's kernel reads cannot be told; empty if they can."""
    if held_experts.is_experts(module):
        return held_experts.unreadable(module)
    if quantized_weights.format_of(module):
        return quantized_weights.unreadable(module)
    return ""


def own_names(model: nn.Module, published: Iterable[str]) -> dict[str, str]:
    """Return published names by what vLLM's modules call those tensors.

    Parts of a model that load themselves may rename what is below them once more, until it is the
    name of a parameter: LFM2 has its part's mapping a second time. That several tensors are one
    parameter is left out of it: ``slices_of`` takes them apart.
    """
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    mappers = []
    for path, module in model.named_modules():
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        if mapper is not None:
            mappers.append((f"{path}." if path else "", replace(mapper, orig_to_new_stacked={})))
    return {_own_name(name, mappers, held): name for name in published}


def _own_name(name: str, mappers: Sequence[tuple[str, Any]], held: Set[str]) -> str:
    for prefix, mapper in mappers:  # the outermost first, as vLLM loads
        if name.startswith(prefix) and name not in held:
            name = prefix + (mapper.map_name(name.removeprefix(prefix)) or "")
    return name


def _of_module(
    path: str,
    module: nn.Module,
    packed: Mapping[str, list[str]],
    own: Mapping[str, str],
    head_dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Iterator[Block]]]:
    """Name and blocks of every parameter, and of every published buffer, of the module itself."""
    if held_experts.is_experts(module):
        yield from held_experts.blocks_of(path, module)
        return
    for name, parameter in module.named_parameters(recurse=False):
        if name in ("weight", "bias"):
            for one in slices_of(module, _layers(path, packed, own)):
                bias = name == "bias"
                blocks = _bias(module, one) if bias else _weight(module, one, head_dtype)
                yield f"{one.name}.{name}", blocks
        elif not quantized_weights.format_of(module):  # else a scale, which is in the weight
            yield f"{path}.{name}".lstrip("."), iter([(0, 0, as_rows(parameter.detach()))])
    for name, buffer in module.named_buffers(recurse=False):
        if f"{path}.{name}" in own:  # Gemma 4 has a number for each layer
            yield f"{path}.{name}", iter([(0, 0, as_rows(buffer))])


def _packed_parts(model: nn.Module) -> dict[str, list[str]]:
    """Return the layers of the files that vLLM stacks into one, by its last name: one for each part
    of the stack, so that a layer with several parts is there several times."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {}) or USUAL
    counts = Counter[str]()
    for module in model.modules():
        stacked = getattr(getattr(module, "hf_to_vllm_mapper", None), "orig_to_new_stacked", {})
        for name, (_, parts) in stacked.items():
            counts[name.strip(".")] = len(parts) if isinstance(parts, tuple) else 1
    return {
        whole: [name for name in names for _ in range(counts[name] or 1)]
        for whole, names in packed.items()
    }


def _layers(path: str, packed: Mapping[str, list[str]], own: Mapping[str, str]) -> list[str]:
    """What a module is made of: itself, where that is published, else what vLLM packs into it."""
    if f"{path}.weight" in own:
        return [path]
    parent, _, last = path.rpartition(".")
    return [f"{parent}.{part}".lstrip(".") for part in packed.get(last, [last])]


def slices_of(layer: nn.Module, names: list[str]) -> list[Slice]:
    """Return what a layer holds of the published layers ``names``, in the order it holds them."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    match layer:
        case VocabParallelEmbedding():
            shard = layer.shard_indices
            rows = (shard.org_vocab_start_index, shard.org_vocab_end_index)
            return [Slice(names[0], 0, rows)]
        case linear.RowParallelLinear():
            size = layer.input_size_per_partition
            return [Slice(names[0], 0, column=layer.tp_rank * size)]
        case linear.QKVParallelLinear():
            shared = layer.tp_rank // layer.num_kv_head_replicas
            query = (layer.tp_rank, layer.num_heads * layer.head_size)
            key = (shared, layer.num_kv_heads * layer.head_size)
            value = (shared, layer.num_kv_heads * layer.v_head_size)
            wholes = [
                layer.total_num_heads * layer.head_size,
                layer.total_num_kv_heads * layer.head_size,
                layer.total_num_kv_heads * layer.v_head_size,
            ]
            return _stacked(names, [query, key, value], wholes)
        case linear.MergedColumnParallelLinear():
            sizes = [size // layer.tp_size for size in layer.output_sizes]
            return _stacked(names, [(layer.tp_rank, size) for size in sizes], layer.output_sizes)
        case linear.ColumnParallelLinear():
            shard = (layer.tp_rank, layer.output_size_per_partition)
            return _stacked(names, [shard], [0])
        case _:
            return [Slice(names[0], 0)]


def regions_of(model: nn.Module, published: Iterable[str]) -> dict[str, tuple[slice, slice]]:
    """Return the rows and columns that a worker reads of published tensors, by name: those that it
    holds, and all of one that it quantizes."""
    regions = {}
    for module, slices in _with_weights(model, published):
        for name, one in slices:
            several = sum(other == name for other, _ in slices) > 1
            whole = several or quantized_weights.format_of(module) is not None
            regions[name] = (slice(None),) * 2 if whole else _region(module, one)
    return regions


def layers_with(model: nn.Module, published: Iterable[str], some: Set[str]) -> Set[str] | None:
    """Return the published names of what the layers hold that hold ``some`` of these tensors: vLLM
    loads a layer as a whole. None if one of them was not found, as in experts."""
    packed = _packed_parts(model)
    own = own_names(model, published)
    found = set[str]()
    for path, module in model.named_modules():
        if not held_experts.is_experts(module):
            names = {own.get(name, "") for name, _ in _of_module(path, module, packed, own)}
            found |= names if names & some else set()
    return found - {""} if some <= found else None


def quantized_names(model: nn.Module, published: Iterable[str]) -> dict[str, NumberFormat]:
    """Return the formats of the published tensors that a worker holds in fewer bits, by name."""
    return {
        name: held_in
        for module, slices in _with_weights(model, published)
        if (held_in := quantized_weights.format_of(module))
        for name, _ in slices
    }


def _with_weights(
    model: nn.Module, published: Iterable[str]
) -> Iterator[tuple[nn.Module, list[tuple[str, Slice]]]]:
    """Yield modules that have a weight, with the published names of its slices."""
    own = own_names(model, published)
    packed = _packed_parts(model)
    for path, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            slices = slices_of(module, _layers(path, packed, own))
            named = [(own.get(f"{one.name}.weight", ""), one) for one in slices]
            yield module, [(name, one) for name, one in named if name]


def _region(layer: nn.Module, one: Slice) -> tuple[slice, slice]:
    if one.rows is not None:
        return slice(*one.rows), slice(None)
    width = getattr(layer, "input_size_per_partition", None)
    columns = slice(None) if width is None else slice(one.column, one.column + width)
    return slice(None), columns


def _stacked(
    names: Sequence[str], shards: Sequence[tuple[int, int]], wholes: Sequence[int]
) -> list[Slice]:
    """Return one shard for each published layer: its number and how many rows it has.

    What the files have as one layer is stacked there as well, each part with all its rows
    (``wholes``). Other layers that are published together are left out.
    """
    named = list(names) * (len(shards) if len(names) == 1 else 1)
    if len(named) != len(shards):
        return []
    slices, first, before = list[Slice](), 0, Counter[str]()
    for name, (number, size), whole in zip(named, shards, wholes, strict=True):
        begin = before[name] + number * size
        slices.append(Slice(name, first, (begin, begin + size)))
        first += size
        before[name] += whole
    return slices


def _head_dtype(model: nn.Module) -> torch.dtype | None:
    """The format in which logits are computed (``model.fp32_lm_head``); None if it is not told."""
    told = (getattr(module, "head_dtype", None) for module in model.modules())
    return next((dtype for dtype in told if dtype is not None), None)


def _weight(layer: nn.Module, one: Slice, head_dtype: torch.dtype | None) -> Iterator[Block]:
    """Rows of a layer's weight, in blocks of columns, as its kernel reads them."""
    weight = held_convolutions.in_order(layer)
    row, held = (one.rows[0], one.held) if one.rows else (0, slice(None))
    if quantized_weights.format_of(layer):
        for first, begin, block in quantized_weights.blocks_of(layer, held):
            yield row + first, one.column + begin, block
        return
    # Of layers with a packed copy output layers alone have a weight, which vLLM casts for fp32.
    cast = head_dtype not in (None, weight.dtype) and weight.numel() > 0
    if cast or not _has_packed_copy(layer):
        yield row, one.column, as_rows(weight)[held]
        return
    size = _columns_of(layer)
    for begin in range(0, size, IDENTITY_ROWS):
        height = min(IDENTITY_ROWS, size - begin)
        unit = torch.zeros(height, size, dtype=weight.dtype)
        unit[torch.arange(height), torch.arange(begin, begin + height)] = 1
        yield row, one.column + begin, layer.cpu_linear(unit, weight, None)[:, held].T


def _columns_of(layer: nn.Module) -> int:
    """Numbers that a layer of linear maps takes, or that an embedding has."""
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    return int(next(getattr(layer, name) for name in names if hasattr(layer, name)))


def _has_packed_copy(layer: nn.Module) -> bool:
    """Whether its kernel multiplies by another copy than its weight: only on CPUs."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    alone = not layer.weight.numel() or isinstance(layer, ParallelLMHead)
    return alone and hasattr(layer, "cpu_linear")


def _bias(layer: nn.Module, one: Slice) -> Iterator[Block]:
    held = one.held if one.rows else slice(None)
    yield 0, one.rows[0] if one.rows else 0, as_rows(layer.bias.detach()[held])


def _part(name: str, source: str, blocks: Iterator[Block], dtype: str) -> dict[str, Any]:
    """Sum up the blocks, side by side, that a module holds of one tensor."""
    published = getattr(torch, dtype, None)
    total, rows, columns = 0, set[int](), set[int]()
    for row, column, block in blocks:
        if published not in FORMATS or block.dtype not in (published, torch.float32):
            problem = f"{name} was published in {dtype}, and is held in {block.dtype}"
            return {"name": name, "source": source, "problem": problem}
        total += int(checksum_of(block.to(published), row, column).item())
        rows |= {row, row + block.shape[0]}
        columns |= {column, column + block.shape[1]}
    region = [min(rows), max(rows), min(columns), max(columns)]
    value = f"{total % MODULUS:016x}"
    return {"name": name, "source": source, "region": region, "checksum": value}
