"""The adapters that a server computes beside the model itself, each for the turns that name it.

The adapter of a run is merged into the model (``merged_weights``); these are kept apart by vLLM,
which computes turns of several together.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from vllm.lora.request import LoRARequest

from libra_cli.node.rollout.turn import TurnRefused


class ServedAdapters:
    """The adapters of one engine, by name; their files are among the run's temporary ones."""

    def __init__(self) -> None:
        self._requests: dict[str, LoRARequest] = {}

    def add(self, name: str, config: str, tensors: bytes) -> LoRARequest:
        """Write the files of an adapter and return how vLLM is asked for it; one of the same name
        is not asked for any more."""
        directory = Path(tempfile.mkdtemp(prefix="adapter-"))
        (directory / "adapter_config.json").write_text(config, encoding="utf-8")
        (directory / "adapter_model.safetensors").write_bytes(tensors)
        number = 1 + max((one.lora_int_id for one in self._requests.values()), default=0)
        request = self._requests[name] = LoRARequest(f"{name}#{number}", number, str(directory))
        return request

    def request(self, name: str | None) -> LoRARequest | None:
        """Return how vLLM is asked for an adapter, or None for the model itself.

        Raises:
            TurnRefused: there is no adapter of that name.
        """
        if name is None:
            return None
        if name not in self._requests:
            raise TurnRefused(f"this server has no adapter {name}")
        return self._requests[name]
