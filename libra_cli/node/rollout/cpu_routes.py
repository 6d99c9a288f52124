"""The experts that a server without a GPU routes tokens to; there vLLM itself cannot tell them.

``--enable-return-routed-experts`` needs vLLM's second model runner, which needs Triton. Here the
routers' choices are kept by the place of a token in the KV cache, so that a request that finds its
prompt in the prefix cache finds the choices that were made for it too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLAG = "--enable-return-routed-experts"
"""vLLM's own flag, by which a server is asked for them."""
SMALL = 256
"""Most experts whose numbers fit a byte."""


class RouteRecorder:
    """Keeps the choices of a model runner's routers."""

    def __init__(self, runner: Any) -> None:
        """Wrap the runner's ``execute_model``, and have every router tell what it chooses."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        config = runner.vllm_config
        model, cache = config.model_config, config.cache_config
        kind = np.uint8 if model.get_num_experts() <= SMALL else np.uint16
        shape = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        most = config.scheduler_config.max_num_batched_tokens
        self._runner = runner
        self._step: NDArray[Any] = np.zeros((most, *shape), dtype=kind)
        self._kept: NDArray[Any] = np.zeros(
            (cache.num_gpu_blocks * cache.block_size, *shape), dtype=kind
        )
        self._places: dict[str, NDArray[Any]] = {}
        """Places in the KV cache of each request's tokens, by the request's id."""
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._capture, module.layer_id))
        self._execute = runner.execute_model
        runner.execute_model = self._watched

    def routes_of(self, request: str) -> NDArray[Any]:
        """``[tokens, layers, k]`` of a request that has just ended, which is forgotten."""
        places = self._places.pop(request, np.zeros(0, dtype=np.int64))
        found: NDArray[Any] = self._kept[places]
        return found

    def _capture(self, layer: int, experts: Any) -> None:
        self._step[: len(experts), layer] = experts.numpy()

    def _watched(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        result = self._execute(scheduled, *arguments, **named)
        batch, at = self._runner.input_batch, 0
        table = batch.block_table[0]
        for row, request in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens.get(request, 0)
            start = int(batch.num_computed_tokens_cpu[row])
            tokens = np.arange(start + count)
            blocks = table.block_table.np[row, tokens // table.block_size].astype(np.int64)
            places = blocks * table.block_size + tokens % table.block_size
            self._kept[places[start:]] = self._step[at : at + count]
            self._places[request] = places
            at += count
        return result
