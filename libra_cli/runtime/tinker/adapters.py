"""The adapters that clients have saved, as directories that PEFT, vLLM and a later service read.

    DIR/<model id>/weights/<name>/            a state to go on from, with the optimizer's moments
    DIR/<model id>/sampler_weights/<name>/    an adapter alone

Both have ``adapter_model.safetensors`` and ``adapter_config.json``; ``tinker://<model id>/...`` is
the same path to a client.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.config.errors import LibraError, StateError

SCHEME = "tinker://"
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
ALPHA = 32
"""The weight of an adapter, whatever its rank, as Tinker has it."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What a client asks for when it creates an adapter."""

    rank: int
    targets: tuple[str, ...]

    @classmethod
    def of(cls, told: dict[str, Any]) -> AdapterShape:
        """Read a ``lora_config``; raises LibraError where it names neither kind of layer."""
        attention = ATTENTION if told.get("train_attn", True) else ()
        targets = (*attention, *(MLP if told.get("train_mlp", True) else ()))
        if not targets:
            raise LibraError(
                "an adapter of the output layer alone is not served: set train_attn or train_mlp"
            )
        return cls(int(told["rank"]), targets)

    def config(self, base_model: str) -> str:
        """Return the text of the ``adapter_config.json`` that PEFT reads."""
        told = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.rank,
            "lora_alpha": ALPHA,
            "target_modules": list(self.targets),
            "bias": "none",
        }
        return json.dumps(told, indent=2) + "\n"


class SavedAdapters:
    """A directory of adapters, by the paths that clients know them by."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(
        self, model_id: str, kind: str, name: str | None, *, config: str, tensors: bytes
    ) -> str:
        """Write an adapter and return its path; one of the same name is replaced.

        Raises:
            LibraError: the name has characters that a file should not have.
            StateError: it cannot be written; the disk may be full.
        """
        path = f"{SCHEME}{model_id}/{kind}/{name or secrets.token_hex(6)}"
        final = self._place(path)
        new = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
        old = new.with_suffix(".old")
        try:
            new.mkdir(parents=True)
            (new / CONFIG).write_text(config, encoding="utf-8")
            (new / TENSORS).write_bytes(tensors)
            with contextlib.suppress(FileNotFoundError):
                os.replace(final, old)
            os.replace(new, final)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.replace(old, final)  # there is none unless the new one could not take its place
            shutil.rmtree(new, ignore_errors=True)
            raise StateError(f"{final} cannot be written: {error.strerror}") from error
        return path

    def load(self, path: str) -> tuple[str, bytes]:
        """Return the configuration and the tensors of a saved adapter.

        Raises:
            LibraError: it is no path of this service.
            StateError: nothing was saved there.
        """
        place = self._place(path)
        try:
            config = (place / CONFIG).read_text(encoding="utf-8")
            return config, (place / TENSORS).read_bytes()
        except OSError as error:
            raise StateError(f"nothing is saved as {path} ({place})") from error

    def has(self, path: str) -> bool:
        """Whether something is saved there; raises LibraError for a path of no service."""
        return (self._place(path) / CONFIG).is_file()

    def delete(self, path: str) -> None:
        """Delete a saved adapter, if there is one; raises LibraError for a path of none."""
        shutil.rmtree(self._place(path), ignore_errors=True)

    def shape(self, path: str) -> AdapterShape:
        """Return what a saved adapter was created with; raises LibraError if there is none."""
        told = json.loads(self.load(path)[0])
        return AdapterShape(told["r"], tuple(told["target_modules"]))

    def _place(self, path: str) -> Path:
        names = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(names) != 3 or not all(map(_NAME.fullmatch, names)):
            raise LibraError(f"{path} is no path of this service: {SCHEME}MODEL/weights/NAME")
        return self._directory.joinpath(*names)
