"""A sequence of a tenant's request, and which of them are computed in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from libra_cli.config.errors import TrainerError


@dataclass(frozen=True, slots=True)
class TenantDatum:
    """One sequence: its tokens, and for each the target and what the loss needs besides."""

    tokens: Tensor
    """The ids of the tokens: ``[tokens]``, int64."""
    targets: Tensor
    """``[tokens]``: what is scored at each place, mostly the next token."""
    inputs: Mapping[str, Tensor]
    """Tensors of float32 and of the same shape, by name."""

    @classmethod
    def parse(cls, told: Mapping[str, Any], needs: Sequence[str]) -> TenantDatum:
        """Read what the controller sends of a datum.

        Raises:
            TrainerError: it lacks an input, or the lengths do not agree.
        """
        tokens = _numbers(told["tokens"], torch.int32).long()
        given = {
            name: _numbers(data, _TYPES[kind]) for name, (kind, data) in told["inputs"].items()
        }
        for name in ("target_tokens", *needs):
            if name not in given:
                raise TrainerError(
                    f"a datum has no {name}: its loss needs target_tokens{_and(needs)}"
                )
        wrong = {name: len(one) for name, one in given.items() if len(one) != len(tokens)}
        if wrong or not len(tokens):
            raise TrainerError(f"a datum has {len(tokens)} tokens, and of other lengths: {wrong}")
        targets = given.pop("target_tokens").long()
        return cls(tokens, targets, {name: one.float() for name, one in given.items()})

    def check_tokens(self, read: int, said: int) -> None:
        """Raise TrainerError for a token that is none of the first ``read`` ids, or a target that
        is none of the first ``said``.

        A GPU takes an index out of bounds for the end of all work of its process.
        """
        for tokens, known in ((self.tokens, read), (self.targets, said)):
            for token in (int(tokens.min()), int(tokens.max())):
                if not 0 <= token < known:
                    raise TrainerError(
                        f"token {token} is none of the model's {known}: give a place that "
                        "does not count any token, and the weight or the advantage 0"
                    )

    def on(self, device: torch.device) -> TenantDatum:
        """Return a copy with all tensors on a device."""
        inputs = {name: one.to(device) for name, one in self.inputs.items()}
        return TenantDatum(self.tokens.to(device), self.targets.to(device), inputs)


_TYPES = {"float32": torch.float32, "int64": torch.int64}


def _numbers(data: bytes, kind: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)


def _and(needs: Sequence[str]) -> str:
    return "".join(f", {name}" for name in needs)


def passes(data: Sequence[TenantDatum], most: int) -> Iterator[list[int]]:
    """Yield the places of the data that one pass computes, of like lengths: padded to the longest
    they have at most ``most`` tokens, unless one alone has more."""
    chosen: list[int] = []
    for place in sorted(range(len(data)), key=lambda one: len(data[one].tokens)):
        if chosen and (len(chosen) + 1) * len(data[place].tokens) > most:
            yield chosen
            chosen = []
        chosen.append(place)
    if chosen:
        yield chosen
