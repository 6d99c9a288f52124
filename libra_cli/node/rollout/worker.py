"""What libra adds to vLLM's workers: they load a version and say what they then hold.

vLLM mixes this class into its worker's (``--worker-extension-cls``), one of which runs for every
tensor-parallel rank, and calls its methods there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from libra_cli.node.rollout import cpu_rotary, cpu_sampler, cpu_tiles
from libra_cli.node.rollout.cpu_routes import RouteRecorder
from libra_cli.node.rollout.draft_head import DraftHead, joined
from libra_cli.node.rollout.held_experts import order_again
from libra_cli.node.rollout.held_tensors import (
    held_parts,
    layers_with,
    quantized_names,
    regions_of,
)
from libra_cli.node.rollout.merged_weights import MergedWeights, UnchangedLayers
from libra_cli.node.rollout.page_locks import locks_for
from libra_cli.node.rollout.prepared import PreparedVersion
from libra_cli.node.rollout.quantized_weights import QuantizedWeights
from libra_cli.node.rollout.sleeping_cache import SleepingCache
from libra_cli.node.weights.chunks import MANIFEST

Named: TypeAlias = Mapping[str, Mapping[str, Any]]
"""What a manifest says of tensors, by name."""
Loaded: TypeAlias = tuple[Named, list[str]]
"""What was brought, and what of it is not the trainer's, as sentences."""


class VersionLoader:
    """The part of a worker that loads versions; ``model_runner`` is the worker's."""

    device: Any
    model_runner: Any
    reload_weights: Any
    sleep: Any
    wake_up: Any
    vllm_config: Any
    base_model: Path | None = None
    """The directory that the server began with, once a version was loaded."""
    prepared: PreparedVersion | None = None
    recorder: RouteRecorder | None = None
    head: DraftHead | None = None
    sleeping_kv: SleepingCache | None = None
    unchanged: UnchangedLayers | None = None
    """What need not be given again, if the last version was an adapter."""

    def mend(self) -> None:
        """Mend what is wrong in vLLM on CPUs: ``cpu_sampler``, ``cpu_rotary``, ``cpu_tiles``."""
        cpu_sampler.mend()
        cpu_rotary.mend()
        cpu_tiles.allow()

    def tell_engine(self) -> str:
        """Return in words what of vLLM's engine runs here, after it has chosen."""
        config = self.vllm_config
        runner = "V2" if config.use_v2_model_runner else "V1"
        ahead = "" if config.scheduler_config.async_scheduling else "no "
        graphs = config.compilation_config.cudagraph_mode.name.lower()
        shown = "no CUDA graphs" if graphs == "none" else f"CUDA graphs {graphs}"
        return f"runner {runner}, {ahead}async scheduling, {shown}"

    def tell_head(self) -> dict[str, Any]:
        """Return what should be held of the model that drafts and what is (``DraftHead.told``)."""
        policy, head = self.model_runner.get_model(), self.model_runner.get_draft_model()
        self.head = DraftHead(head, policy, self.vllm_config.speculative_config)
        return self.head.told()

    def record_routes(self) -> None:
        """Keep from now on which experts tokens are routed to."""
        self.recorder = RouteRecorder(self.model_runner)

    def routes_of(self, request: str) -> Any:
        """The experts of a request that has just ended, ``[tokens, layers, k]``."""
        assert self.recorder is not None
        return self.recorder.routes_of(request)

    def prepare_version(self, directory: str) -> bool:
        """Begin to bring a version into memory, or tell whether it is; generation goes on."""
        if self.prepared is None or self.prepared.directory != directory:
            if self.prepared is not None:
                self.prepared.close()
            model, tensors = self.model_runner.get_model(), _manifest(directory)["tensors"]
            regions = regions_of(model, tensors)
            self.prepared = PreparedVersion(directory, regions, locks_for(self.device))
        return self.prepared.is_done

    def fall_asleep(self) -> None:
        """Give back KV cache and weights; on a CPU no weights, of which kernels have copies."""
        self.unchanged = None
        if self.prepared is not None:
            self.prepared.close()
            self.prepared = None
        if self.device.type == "cpu":
            self.sleeping_kv = SleepingCache(self.model_runner.kv_caches)
        else:
            self.sleep(level=2)

    def take_memory(self) -> None:
        """Take back what ``fall_asleep`` gave; weights are anything until a version is loaded."""
        cache, self.sleeping_kv = self.sleeping_kv, None
        if cache is not None:
            cache.wake()
        else:
            self.wake_up()

    def load_version(self, directory: str) -> dict[str, Any]:
        """Load a version in place; return what should be held then and what is, what was ``wrong``
        before, and the seconds to find out."""
        if self.base_model is None:  # vLLM calls the last directory that it loaded its model
            self.base_model = Path(self.vllm_config.model_config.model)
        manifest = _manifest(directory)
        self.prepare_version(directory)
        prepared, self.prepared = self.prepared, None
        assert prepared is not None
        with closing(prepared):
            if "adapter" in manifest:
                expected, wrong = self._load_adapter(Path(directory), manifest)
            else:
                self.unchanged = None
                expected, wrong = self._load(prepared.tensors(), manifest["tensors"])
        model = self.model_runner.get_model()
        began = time.monotonic()
        held = held_parts(model, {name: about["dtype"] for name, about in expected.items()})
        answer = {"expected": expected, "wrong": wrong, "held": held}
        if self.head is not None:
            answer = joined(answer, self.head.told())
        if self.device.type == "cuda":
            _give_back()
        return {**answer, "proof_s": time.monotonic() - began}

    def _load_adapter(self, version: Path, manifest: dict[str, Any]) -> Loaded:
        assert self.base_model is not None
        unchanged = self.unchanged = self.unchanged or UnchangedLayers()
        model, base = self.model_runner.get_model(), manifest["adapter"]["base"]
        needed = unchanged.needed(manifest, lambda some: layers_with(model, base, some))
        merged = MergedWeights(self.base_model, version, manifest, self.device, needed)
        expected, wrong = self._load(merged, merged.expected, partly=needed is not None)
        wrong = [*wrong, *merged.wrong]
        return expected if wrong else unchanged.keep(manifest, expected), wrong

    def _load(
        self, tensors: Iterable[tuple[str, Tensor]], expected: Named, *, partly: bool = False
    ) -> Loaded:
        """Give vLLM's loader tensors, ``partly``: not those of every layer; return what they must
        be as the worker holds them, and what was wrong."""
        model = self.model_runner.get_model()
        formats = quantized_names(model, expected)
        given = QuantizedWeights(tensors, expected, formats, self.device)
        with _quiet_loader() if partly else nullcontext():
            self.reload_weights(weights_iterator=iter(given))
        _pack_tied_heads(model)
        if not partly:
            order_again(model)
        return given.expected, given.wrong


@contextmanager
def _quiet_loader() -> Iterator[None]:
    """Keep vLLM from warning of every layer that it was given nothing for."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _give_back() -> None:
    """Return what a version was loaded and proved with, so that others on the GPU can have it."""
    import torch

    torch.cuda.empty_cache()


def _manifest(directory: str) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((Path(directory) / MANIFEST).read_bytes())
    return manifest


def _pack_tied_heads(model: Any) -> None:
    """Pack output layers again that have no tensor of their own.

    The CPU kernels compute with a packed copy, which vLLM makes anew only of what was in the files.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    others = {id(module.weight) for module in model.modules() if _has_weight(module, heads)}
    for head in heads:
        if id(head.weight) in others and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def _has_weight(module: Any, heads: list[Any]) -> bool:
    return hasattr(module, "weight") and all(module is not head for head in heads)
