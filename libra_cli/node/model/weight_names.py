"""What a model's tensors are called in its files, and how they are made of those in memory.

transformers renames tensors while it loads them (the prefix of a language model that is a part of
another one), stacks some (the experts of a mixture) and cuts others. Servers, exports and other
hosts know the names of the files alone. ``WeightNames`` puts every name of the files through
transformers' own conversions, as its loader does, and so knows which tensors in memory are made of
which in the files. What goes back goes through the reverse of the same conversions, one group of
tensors at a time: a group is as small as the conversion allows, for example one layer's experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from libra_cli.config.errors import WeightsError
from libra_cli.config.vision import SEEING
from libra_cli.node.weights.adapter import A, B
from libra_cli.node.weights.model_files import shapes_in

WEIGHT = ".weight"
OF_EXPERTS = ".adapter."
"""In names of an adapter's tensors of all experts of a layer, before that of the tensor."""
DROPOUT = re.compile(r"dropout|_pdrop$")
"""What configurations call the share of numbers that training leaves out."""
WHOLE = "model.path: a directory with all weights of the model, as its publisher wrote it"
LANGUAGE_MODEL = "language_model"
"""What transformers calls the text part of a model that also sees or hears."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """Tensors in memory that are made of tensors in the files, and of no others."""

    memory: tuple[str, ...]
    """Names of the tensors in memory; of tied ones the first."""
    disk: Mapping[str, tuple[int, ...]]
    """Shapes of the tensors in the files, by their names there."""
    conversion: Conversion | Slices | None = None
    """How one becomes the other; None if it is one tensor under two names."""

    def to_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the files, of those in memory; both by name."""
        if self.conversion is None:
            return dict.fromkeys(self.disk, tensors[self.memory[0]])
        return self.conversion.to_disk({name: tensors[name] for name in self.memory})

    def to_memory(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in memory, of those of the files; both by name."""
        if self.conversion is None:
            return {self.memory[0]: tensors[next(iter(self.disk))]}
        return self.conversion.to_memory({name: tensors[name] for name in self.disk})


class Conversion:
    """One of transformers' converters, for the tensors of one group."""

    def __init__(
        self, converter: WeightConverter, first: str, sources: Mapping[str, list[str]], model: Any
    ) -> None:
        """``first`` is the first tensor in memory; ``sources`` are the names in the files by the
        converter's pattern that they match, in the order of their numbers."""
        self._converter = converter
        self._reverse: WeightConverter = converter.reverse_transform()
        self._first = first
        self._sources = sources
        self._model = model
        self._disk: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Name and shape in the files, by the name that the reverse conversion gives."""

    def settle(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        between: Mapping[str, str],
        held: Mapping[str, Tensor],
    ) -> tuple[str, ...]:
        """Try both ways without numbers; return the names in memory.

        ``between`` has for each name in the files what it is after all renaming and before the
        conversion; ``held`` is the model by name.

        Raises:
            WeightsError: the files' tensors do not give the model's, or those not the files'.
        """
        disk = {name: torch.empty(shapes[name], device="meta") for name in self._names}
        try:
            memory = self.to_memory(disk)
            back = self._reversed(memory)
        except (RuntimeError, ValueError, KeyError) as error:
            raise self._refused(str(error)) from error
        for name, tensor in memory.items():
            if name not in held or held[name].shape != tensor.shape:
                raise self._refused(f"they give {name} of the shape {list(tensor.shape)}")
        prefix = f"{self._model.base_model_prefix}."
        known = {between[name].removeprefix(prefix): name for name in disk}
        for name, tensor in back.items():
            own = known.pop(name.removeprefix(prefix), "")
            if not own or tensor.numel() != disk[own].numel():
                raise self._refused(f"it is written as {name}, which they have not")
            self._disk[name] = own, shapes[own]
        if known:
            raise self._refused(f"{min(known.values())} is not written again")
        return tuple(memory)

    def _refused(self, why: str) -> WeightsError:
        return WeightsError(
            f"transformers makes {self._first} of {len(self._names)} tensors of the model's "
            f"files, for example {self._names[0]}, but these do not fit: {why}",
            hint=WHOLE,
        )

    @property
    def matrices(self) -> list[list[str]]:
        """Names in the files by the place in the tensor in memory that they are put in: of experts
        the first matrices, and below them the second; each list in the order of experts."""
        patterns = self._converter.source_patterns
        return [self._sources[one] for one in patterns if one in self._sources]

    @property
    def _names(self) -> list[str]:
        return [name for names in self._sources.values() for name in names]

    def to_memory(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert as transformers does when it loads the files."""
        converter = deepcopy(self._converter)
        for pattern, names in self._sources.items():
            for name in names:
                converter.add_tensor(self._first, name, pattern, tensors[name])
        return self._run(converter, self._first)

    def to_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert as transformers does when it writes files."""
        converted = self._reversed(tensors)
        return {  # of its own, since what shares its memory with others cannot be written
            own: converted[name].reshape(shape).clone() for name, (own, shape) in self._disk.items()
        }

    def _reversed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter, first = deepcopy(self._reverse), ""
        for name, tensor in tensors.items():
            renamed, pattern = converter.rename_source_key(name)
            first = first or renamed
            converter.add_tensor(renamed, name, pattern or "", tensor)
        return self._run(converter, first)

    def _run(self, converter: WeightConverter, first: str) -> dict[str, Tensor]:
        done = converter.convert(first, model=self._model, config=self._model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in done.items()}


class Slices:
    """Tensors of an adapter on experts, of which each in the files is a part of one expert."""

    def __init__(self, memory: str, places: Mapping[str, tuple[int, slice]]) -> None:
        """``places`` has for each name in the files the expert and its rows; in order."""
        self._memory = memory
        self._places = places

    def to_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cut the tensor in memory."""
        whole = tensors[self._memory]
        return {name: whole[place].clone() for name, place in self._places.items()}

    def to_memory(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put together what was cut."""
        experts: dict[int, list[Tensor]] = {}
        for name, (expert, _) in self._places.items():
            experts.setdefault(expert, []).append(tensors[name])
        return {self._memory: torch.stack([torch.cat(parts) for parts in experts.values()])}


class WeightNames:
    """The tensors of a model in memory and in its files."""

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """``model`` may be on the meta device, and is as transformers makes it: not sharded and
        without adapters. ``shapes`` are those of the tensors in the files, by name.

        Raises:
            WeightsError: the files lack tensors of the model, or cannot be made of them again.
        """
        self.model = model
        held: dict[str, Tensor] = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(held.items())}
        once = {name: first[id(tensor)] for name, tensor in held.items()}
        found: dict[str, TensorGroup] = {}
        self.unused: list[str] = []
        """Names of the files that the model does not have: towers that see, heads that draft."""
        for group in self._grouped(shapes, held, once):
            if not held.keys() >= set(group.memory):
                self.unused += group.disk
            elif not found.keys() & set(group.memory):  # a tied one may be there twice
                found |= dict.fromkeys(group.memory, group)
        missing = {*once.values()} - found.keys()
        if missing:
            foreign = f"; they have {min(self.unused)}, which it has not" if self.unused else ""
            raise WeightsError(
                f"{len(missing)} tensors of {type(model).__name__} are not in the model's files, "
                f"for example {min(missing)}{foreign}",
                hint=WHOLE,
            )
        #: In the order of the model: what is made of one layer comes together.
        self.groups = tuple(dict.fromkeys(found[name] for name in once.values()))

    def adapter_groups(self, tensors: Mapping[str, Tensor]) -> tuple[TensorGroup, ...]:
        """Return groups of an adapter's tensors, which are named by the layers in memory.

        Raises:
            WeightsError: a matrix with an adapter is not one matrix in the files.
        """
        layers = {group.memory[0]: group for group in self.groups}
        return tuple(
            _of_experts(name, tensor, layers)
            if OF_EXPERTS in name
            else TensorGroup((name,), {_in_files(name, layers): tuple(tensor.shape)})
            for name, tensor in tensors.items()
        )

    def _grouped(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        held: Mapping[str, Tensor],
        once: Mapping[str, str],
    ) -> Iterator[TensorGroup]:
        """Put every name of the files through the conversions, as transformers' loader does."""
        conversions = get_model_conversion_mapping(self.model)
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in conversions if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix = self.model.base_model_prefix
        between: dict[str, str] = {}
        sources: dict[str, dict[str, list[str]]] = {}
        for name in sorted(shapes, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, held)
            if renamed not in held and name in held:
                renamed, pattern = rename_source_key(name, [], [], prefix, held)
            if pattern is None:
                yield TensorGroup((once.get(renamed, renamed),), {name: shapes[name]})
                continue
            between[name], _ = rename_source_key(name, renamings, [], prefix, held)
            sources.setdefault(renamed, {}).setdefault(pattern, []).append(name)
        for renamed, parts in sources.items():
            disk = {name: shapes[name] for names in parts.values() for name in names}
            if renamed not in held:
                yield TensorGroup((renamed,), disk)
                continue
            converter = by_pattern[next(iter(parts))]
            conversion = Conversion(converter, renamed, parts, self.model)
            yield TensorGroup(conversion.settle(shapes, between, held), disk, conversion)


def _in_files(name: str, layers: Mapping[str, TensorGroup]) -> str:
    """What an adapter's tensor is called beside the matrix that it changes."""
    factor = A if name.endswith(A) else B
    group = layers.get(name.removesuffix(factor) + WEIGHT)
    if group is None or group.conversion is not None:
        raise WeightsError(
            f"{name.removesuffix(factor)} is not one matrix in the model's files, so servers "
            "could not add an adapter to it",
            hint="name other matrices in training.lora.target_modules",
        )
    return next(iter(group.disk)).removesuffix(WEIGHT) + factor


def _of_experts(name: str, tensor: Tensor, layers: Mapping[str, TensorGroup]) -> TensorGroup:
    """The group of an adapter's tensor of all experts of a layer."""
    factor = A if name.endswith(A) else B
    group = layers.get(name.removesuffix(factor).replace(OF_EXPERTS, "."))
    parts = group.conversion.matrices if group and isinstance(group.conversion, Conversion) else []
    if not parts or any(len(part) != len(tensor) for part in parts):
        raise WeightsError(
            f"the experts of {name} are not a matrix each in the model's files, so servers could "
            "not add an adapter to them",
            hint="set training.lora.experts: false",
        )
    rows = tensor.shape[1] // len(parts)
    places = {
        matrix.removesuffix(WEIGHT) + factor: (expert, slice(part * rows, (part + 1) * rows))
        for expert in range(len(tensor))
        for part, matrix in enumerate(one[expert] for one in parts)
    }
    disk = dict.fromkeys(places, (rows, tensor.shape[2]))
    return TensorGroup((name,), disk, Slices(name, places))


def text_config(model_dir: Path | str) -> PreTrainedConfig:
    """Return the configuration of the language model in a directory, the whole or a part of it.

    Where the language model is a part, its class knows only its own names. transformers maps those
    of the files to the whole model's; what is added here is that the whole model's are the part's
    behind a prefix, as transformers itself says of Qwen3.5. Dropout is off: the tokens' ratios are
    of probabilities that a model with dropout would give otherwise at every pass. Of a family
    whose images are known it is the whole model's: its tower is served, and so is published.

    Raises:
        WeightsError: transformers has no such model of its own; code beside the files is not run.
    """
    try:
        whole = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        if whole.model_type in SEEING:
            _without_dropout(whole.get_text_config(decoder=True))
            return whole
        part = whole.get_text_config(decoder=True)
    except (KeyError, OSError, ValueError) as error:
        raise _unknown(model_dir, error) from error
    if type(part) not in AutoModelForCausalLM._model_mapping:
        raise _unknown(model_dir, f"{type(part).__name__} is no language model that generates")
    if part is not whole and get_checkpoint_conversion_mapping(part.model_type) is None:
        to_whole = get_checkpoint_conversion_mapping(whole.model_type) or []
        prefix = PrefixChange(prefix_to_remove=LANGUAGE_MODEL, model_prefix="model")
        register_checkpoint_conversion_mapping(part.model_type, [*to_whole, prefix])
    part = _as_served(part)
    _without_dropout(part)
    return part


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class of classes that has the model of a configuration."""
    return AutoModelForImageTextToText if config.model_type in SEEING else AutoModelForCausalLM


def _without_dropout(part: PreTrainedConfig) -> None:
    for name, value in part.to_dict().items():
        if DROPOUT.search(name) and isinstance(value, float):
            setattr(part, name, 0.0)


def _as_served(part: PreTrainedConfig) -> PreTrainedConfig:
    """Let Command A's windows be one token longer than transformers has them: vLLM says that it was
    trained so, and the trainer computes what servers sample (``commandr.py`` of vLLM 0.32)."""
    if part.model_type == "cohere2" and part.sliding_window:
        part.sliding_window += 1
    return part


def _unknown(model_dir: Path | str, why: object) -> WeightsError:
    told = " ".join(str(why).split())[:300]
    return WeightsError(
        f"transformers {transformers.__version__} cannot make a causal language model of "
        f"{model_dir}/config.json: {told}",
        hint="model.path: a model whose class is part of transformers (libra help models)",
    )


def empty_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a causal language model on the meta device: its tensors have no numbers."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def names_of(model_dir: Path) -> WeightNames:
    """Return the names of the language model in a directory; its files' headers alone are read.

    Raises:
        WeightsError: its files are not those of the model, or cannot be read.
    """
    try:
        shapes = shapes_in(model_dir)
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightsError(
            f"the weights in {model_dir} cannot be read: {error}",
            hint="model.path: a directory that is whole; libra setup copies one to hosts",
        ) from error
    return WeightNames(empty_model(text_config(model_dir)), shapes)
