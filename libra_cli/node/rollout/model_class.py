"""Has vLLM look at a model's class in this process, on hosts without GPUs.

To know what a class supports, the first server of a user on a host starts another process, which
imports vLLM again (11 s of a core), and keeps the answer in ~/.cache/vllm. That is so that CUDA is
not initialised too early, and the class is imported here a moment later anyway.
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform


def register_classes(directory: Path) -> None:
    """Import the classes that a model's config.json names, and tell vLLM of them."""
    if not current_platform.is_cpu():
        return
    config = json.loads((directory / "config.json").read_bytes())
    for name in config.get("architectures") or ():
        if name in ModelRegistry.models:  # else vLLM says what it knows instead
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
