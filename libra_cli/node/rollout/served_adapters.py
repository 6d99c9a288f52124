"""The adapters that a server computes beside the model itself, each for the turns that name it.

The adapter of a run is merged into the model (``merged_weights``); these are kept apart by vLLM,
which computes turns of several together.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

from vllm.lora.request import LoRARequest

from libra_cli.node.rollout.turn import TurnRefused


class ServedAdapters:
    """The adapters of one engine, by name; their files are among the run's temporary ones."""

    def __init__(self) -> None:
        self._requests: dict[str, LoRARequest] = {}
        self._numbers = itertools.count(1)

    def add(self, name: str, config: str, tensors: bytes) -> LoRARequest:
        """Write the files of an adapter and return how vLLM is asked for it; one of the same name
        is not asked for any more."""
        directory = Path(tempfile.mkdtemp(prefix="adapter-"))
        (directory / "adapter_config.json").write_text(config, encoding="utf-8")
        (directory / "adapter_model.safetensors").write_bytes(tensors)
        # One number never stands for two: what vLLM has cached of contexts goes by name and number.
        number = next(self._numbers)
        request = self._requests[name] = LoRARequest(f"{name}#{number}", number, str(directory))
        return request

    def remove(self, name: str) -> int:
        """Delete the files of an adapter and return the number that vLLM knows it by.

        Raises:
            TurnRefused: there is no adapter of that name.
        """
        request = self._known(name)
        del self._requests[name]
        shutil.rmtree(request.lora_path, ignore_errors=True)
        return int(request.lora_int_id)

    def request(self, name: str | None) -> LoRARequest | None:
        """Return how vLLM is asked for an adapter, or None for the model itself.

        Raises:
            TurnRefused: there is no adapter of that name.
        """
        return None if name is None else self._known(name)

    def _known(self, name: str) -> LoRARequest:
        if name not in self._requests:
            raise TurnRefused(f"this server has no adapter {name}")
        return self._requests[name]
