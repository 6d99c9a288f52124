"""The model of a version that is an adapter: merged in place, of the base model's own files.

A server has the base model on its disk and gets only the adapter. It goes through the base model's
files, makes of every matrix with an adapter W + scaling B A, and hands each tensor to vLLM's loader
as if it had read it: nothing is written to a disk, nothing adds up from version to version, and
what vLLM does with tensors (fusing, slicing, packing) is not done again here.

Layers without an adapter are the base model's in every version. Once they were loaded, a version
brings only the layers that have one (``UnchangedLayers``), and only of those is the base read.

**Proof.** Another host may round a product of matrices otherwise, so the trainer cannot say what a
merged matrix adds up to. It says so of what goes in: of A, of B and of the base model's tensors, as
it has them itself. Whoever merges checks those, and says what comes out; and that is what the
workers must then hold. The same inputs and one and the same function leave no other version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from libra_cli.node.weights.adapter import adapted, factors_of
from libra_cli.node.weights.checksum import checksum, described
from libra_cli.node.weights.model_files import tensors_in


class UnchangedLayers:
    """The layers without an adapter that a worker holds of the base model since a load before."""

    def __init__(self) -> None:
        self._of: tuple[Any, Set[str]] | None = None
        self._held: Mapping[str, Mapping[str, Any]] = {}

    def needed(
        self, manifest: Mapping[str, Any], layers_with: Callable[[Set[str]], Set[str] | None]
    ) -> Set[str] | None:
        """Return which of the base model's tensors a version of this manifest must bring; None for
        all. ``layers_with`` names what the layers hold that hold some of these tensors. Until
        ``keep``, anything may be held."""
        of, self._of = self._of, None
        if of == _base_and_targets(manifest):
            return layers_with(of[1])
        self._held = {}
        return None

    def keep(
        self, manifest: Mapping[str, Any], expected: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return what every tensor must be as a worker holds it: ``expected`` those that were just
        brought, the others as before."""
        self._of = _base_and_targets(manifest)
        self._held = {**self._held, **expected}
        return self._held


def _base_and_targets(manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], Set[str]]:
    return manifest["adapter"]["base"], adapted(manifest["tensors"])


class MergedWeights:
    """The tensors of a version, one after the other; each is described once it was given."""

    def __init__(
        self,
        model_dir: Path,
        version: Path,
        manifest: Mapping[str, Any],
        device: torch.device,
        needed: Set[str] | None = None,
    ) -> None:
        """``manifest`` is the version's; products are computed on ``device``; of the base model the
        tensors that are ``needed`` are given, None for all."""
        self._needed = needed
        self._model_dir = model_dir
        self._version = version
        self._told: Mapping[str, Mapping[str, Any]] = manifest["tensors"]
        self._base: Mapping[str, Mapping[str, Any]] = manifest["adapter"]["base"]
        self._scaling = float(manifest["adapter"]["scaling"])
        self._device = device
        self.expected: dict[str, dict[str, Any]] = {
            name: dict(about) for name, about in self._base.items() if self._is_needed(name)
        }
        """What the manifest of a whole version would say of the tensors that are needed."""
        self.wrong: list[str] = []
        """Tensors that are not the trainer's, as sentences."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        adapter = self._read_adapter()
        targets = adapted(adapter)
        for name, tensor in tensors_in(self._model_dir, self._is_needed):
            if name in targets:
                tensor = self._merged(name, tensor.to(self._device), adapter)
                targets.remove(name)
            yield name, tensor
        self.wrong += [f"{name} is not in {self._model_dir}" for name in sorted(targets)]

    def _is_needed(self, name: str) -> bool:
        return self._needed is None or name in self._needed

    def _read_adapter(self) -> dict[str, Tensor]:
        tensors = dict(tensors_in(self._version))
        for name, about in self._told.items():
            self._check(name, tensors[name], about, str(self._version))
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}

    def _merged(self, name: str, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        about = self._base[name]
        dtype = getattr(torch, about["dtype"])
        self._check(name, weight.to(dtype), about, str(self._model_dir))
        merged = factors_of(name, adapter).merged(weight, self._scaling, dtype)
        self.expected[name] = described(merged)
        return merged

    def _check(self, name: str, tensor: Tensor, about: Mapping[str, Any], place: str) -> None:
        if checksum(tensor) != int(about["checksum"], 16):
            self.wrong.append(f"{name} in {place} is not the trainer's")
