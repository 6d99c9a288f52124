"""Tells whether the model that drafts on a worker is the one in its files.

A head (EAGLE) has a directory of its own; MTP layers are in the policy's base directory, under
names that the policy's trainer leaves out. Either is loaded once, when the server starts, and no
version brings it anew: it is version 0, as it was given. vLLM gives some heads the embedding and
the output layer of the policy, which versions change. So what is proved after each load is the rest
of the head: that it is still what its files have.

``held_tensors`` reads what a module holds, by the names that vLLM's modules have. What files call
the same tensors differs from there by a prefix, and by the layer that MTP puts around a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from libra_cli.node.rollout.held_tensors import held_parts
from libra_cli.node.weights.checksum import described
from libra_cli.node.weights.model_files import tensors_in

HEADS = ("eagle", "eagle3", "mtp")
"""Methods of vLLM whose drafts come from a model beside the policy."""
TARGET_IDS = "d2t"
"""In files of EAGLE-3 heads: what to add to the number of a drafted token to get the policy's."""
OWN = "draft model: "
"""Before names of a head's tensors, which may be those of the policy's as well."""
_AROUND = re.compile(r"(enorm|hnorm|eh_proj|shared_head)\.")
"""Parts of an MTP layer, as DeepSeek's and GLM's files call them, that are beside its block."""


class DraftHead:
    """The head of a worker, and what its files say that it should hold."""

    def __init__(self, model: nn.Module, policy: nn.Module, config: Any) -> None:
        """``config`` is vLLM's SpeculativeConfig; the files are read now.

        Raises:
            OSError, ValueError, SafetensorError: a file cannot be read.
        """
        self._model = model
        shared = {id(module) for module in policy.modules()}
        modules = model.named_modules(remove_duplicate=False)
        self._shared = {path for path, module in modules if id(module) in shared}
        """Modules that are the policy's own."""
        draft = config.draft_model_config
        self._wrong: list[str] = []
        self._expected: dict[str, dict[str, Any]] = {}
        self._read(Path(draft.model), config.method, draft.hf_text_config, draft.dtype)

    def _read(self, directory: Path, method: str, config: Any, dtype: torch.dtype) -> None:
        names = mtp_name if method == "mtp" else eagle_name
        for name, tensor in tensors_in(directory, lambda name: bool(names(name, config))):
            if not tensor.is_floating_point():
                self._check_ids(tensor)
                continue
            own = names(name, config)
            if own.rpartition(".")[0] not in self._shared:
                self._expected[own] = described(tensor.to(dtype))

    def _check_ids(self, tensor: torch.Tensor) -> None:
        held = getattr(self._model, "draft_id_to_target_id", None)
        if held is None and not tensor.any():
            return  # with the policy's whole vocabulary the numbers are equal
        if held is None or not torch.equal(held.detach().cpu(), tensor):
            self._wrong.append(f"{OWN}{TARGET_IDS} is not the one in its files")

    def told(self) -> dict[str, Any]:
        """Return what of the head should be ``expected`` on a worker, what is ``held`` there, and
        sentences on what is ``wrong``, as a load does of the policy."""
        dtypes = {name: about["dtype"] for name, about in self._expected.items()}
        held = [
            part if "problem" in part else {**part, "name": OWN + part["name"]}
            for part in held_parts(self._model, dtypes)
            if part["source"] not in self._shared
        ]
        expected = {OWN + name: about for name, about in self._expected.items()}
        return {"expected": expected, "held": held, "wrong": list(self._wrong)}


def eagle_name(name: str, config: Any) -> str:
    """Return what vLLM's module of an EAGLE head calls a tensor of its files; empty for none."""
    if name == "t2d":  # the same as d2t, told the other way round
        return ""
    return name if name.startswith("lm_head") or name == TARGET_IDS else f"model.{name}"


def mtp_name(name: str, config: Any) -> str:
    """Return what vLLM's module of MTP layers calls a tensor of the policy's files; empty for one
    that is not of these layers, or that it takes from the policy."""
    if name.startswith("mtp."):  # Qwen3-Next, Qwen3.5
        return "model." + name.removeprefix("mtp.")
    found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    if found is None or int(found[1]) < config.num_hidden_layers:
        return ""
    inner = found[2]
    if inner.startswith(("embed_tokens.", "shared_head.head.")):
        return ""
    block = "" if _AROUND.match(inner) else "mtp_block."
    return f"model.layers.{found[1]}.{block}{inner}"


def joined(policy: Mapping[str, Any], head: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker answers of both: ``policy`` is of a load, ``head`` is ``DraftHead.told``."""
    return {
        **policy,
        "expected": {**policy["expected"], **head["expected"]},
        "held": [*policy["held"], *head["held"]],
        "wrong": [*policy["wrong"], *head["wrong"]],
    }
