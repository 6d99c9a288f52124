"""The rollout backend vLLM: the argv and the environment of one server.

Why the flags are what they are:

- Servers listen on a Unix socket and VLLM_HOST_IP is loopback: nothing of a server is reachable
  from outside, and a host without a default route works.
- ``--worker-extension-cls``: workers load versions and prove which they hold.
- ``--generation-config vllm``: a model's own sampling defaults (top_k, temperature) would change
  the distribution the loss believes in.
- ``--language-model-only``: of a model that also sees or hears, what is trained is served alone.
  Its towers are not loaded, and neither images nor sounds are prepared to measure memory with.
- With ``model.images`` the tower is loaded instead. What it needs is not measured, prompts come
  with the tokens of their images and with patches that are scaled already, and nothing of them is
  kept beside vLLM's cache of what the tower made.
- ``--logprobs-mode processed_logprobs``: log-probabilities after temperature, as the trainer's.
- ``--hf-overrides`` with a ``head_dtype``: products of the output layer are summed into float32.
- ``--no-async-scheduling`` where a head drafts: whether it does is decided between two steps, and
  vLLM would schedule a step's drafts before the step before it ends.
- ``--kv-cache-memory-bytes`` where memory is shared with a rank (``core.launch.shares``).
- ``rollout.engine: safe`` turns off what vLLM does on GPUs alone: two steps in flight, CUDA graphs
  and, by its environment, the second model runner.
- ``--scheduling-policy priority`` orders vLLM's own waiting queue; admission is the request
  scheduler's (``libra_cli.core.scheduling.request_scheduler``).
"""

from __future__ import annotations

import json

from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.launch.process import (
    Flags,
    HostFacts,
    ProcessSpec,
    argv_of,
    common_env,
    compiler_caches,
    dtype_of,
    interface_env,
    process_of,
)
from libra_cli.core.launch.rollout_backend import ServerLaunch
from libra_cli.core.launch.shares import server_share, shared_cache_bytes

SOCKET_DIRECTORY = 107 - 37
"""Bytes that a directory may have where a socket is called by a UUID: Linux allows 107 for the
whole path (unix(7)), of which the slash and the UUID take 37."""


_SEEING: Flags = {
    "--skip-mm-profiling": None,
    "--no-mm-device-do-normalize": None,
    "--mm-processor-cache-gb": 0,
    "--limit-mm-per-prompt": json.dumps({"video": 0}),
}
"""Flags of servers whose prompts have images."""
_SAFE: Flags = {
    "--no-async-scheduling": None,
    "--compilation-config": json.dumps({"cudagraph_mode": "NONE"}),
}
"""Flags of rollout.engine: safe."""
_FP32_HEAD: Flags = {"--hf-overrides": json.dumps({"head_dtype": "float32"})}
"""The flag of servers that compute logits in float32."""


class Vllm:
    """The pure half of the backend; see the module."""

    packages: tuple[str, ...] = ("vllm", "torch", "transformers")
    connection = "libra_cli.runtime.vllm.client:ServerClient"

    def server(self, recipe: Recipe, launch: ServerLaunch) -> ProcessSpec:
        slot = launch.slot
        return ProcessSpec(
            node=slot.node,
            process=process_of(slot.id),
            argv=(
                launch.facts.python,
                "-m",
                "libra_cli.node.rollout.server",
                *argv_of(_flags(recipe, launch)),
                *recipe.rollout.vllm_args,
            ),
            env=_env(recipe, launch) | recipe.node(slot.node).env,
        )


def _flags(recipe: Recipe, launch: ServerLaunch) -> Flags:
    slot, bucket, node = launch.slot, launch.bucket, recipe.node(launch.slot.node)
    flags: dict[str, str | int | float | None] = {
        "--socket": launch.socket,
        "--model": launch.model_dir,
        "--dtype": dtype_of(recipe.model, [slot]),
        "--max-model-len": recipe.model.max_len,
        "--max-num-seqs": bucket.max_num_seqs,
        "--tensor-parallel-size": bucket.tensor_parallel,
        "--scheduling-policy": "priority",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--seed": launch.seed,
        "--worker-extension-cls": "libra_cli.node.rollout.worker.VersionLoader",
        **(_SEEING if recipe.model.images else {"--language-model-only": None}),
        **(_SAFE if recipe.rollout.engine == "safe" else {}),
        **(_FP32_HEAD if recipe.model.fp32_lm_head else {}),
    }
    if recipe.rollout.quantization is not None:
        flags["--quantization"] = recipe.rollout.quantization
    if recipe.rollout.speculative is not None:
        flags["--speculative-config"] = json.dumps(recipe.rollout.speculative.flags)
        if recipe.rollout.speculative.has_head:
            flags["--no-async-scheduling"] = None
    if recipe.training.rollout_routes:
        flags["--enable-return-routed-experts"] = None
    if slot.gpus:
        flags["--gpu-memory-utilization"] = _utilization(launch, node, recipe.rollout.gpu_memory)
        flags |= {"--enable-sleep-mode": None} if recipe.rollout.sleep else {}
    else:
        flags["--enforce-eager"] = None
    if node.share is not None and launch.facts.is_guessed:
        flags["--kv-cache-memory-bytes"] = "<what its share leaves beside the weights>"
    elif cache := shared_cache_bytes(launch, node, recipe.rollout, recipe.model):
        flags["--kv-cache-memory-bytes"] = cache
    return flags


def _utilization(launch: ServerLaunch, node: NodeSpec, gpu_memory: float | None) -> float | str:
    if launch.facts.is_guessed and node.share is None and gpu_memory is None:
        return "<0.9, or 0.85 below 30 GB>"
    return server_share(node, gpu_memory, launch.facts.gpu_gib)


def _env(recipe: Recipe, launch: ServerLaunch) -> dict[str, str]:
    slot, facts, node = launch.slot, launch.facts, recipe.node(launch.slot.node)
    ranks = 1 if slot.gpus else launch.bucket.tensor_parallel  # each has threads of its own
    env = {
        **common_env(node, [slot], facts, processes=ranks),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        **interface_env("lo"),
        **sockets_env(facts),
    }
    if recipe.rollout.engine == "safe":
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if slot.gpus:
        env |= {"VLLM_CACHE_ROOT": f"{facts.workdir}/cache/vllm", **compiler_caches(facts)}
    else:
        # Of every rank: two hold twice as much, since each has a half of the heads.
        if not shared_cache_bytes(launch, node, recipe.rollout, recipe.model):
            env["VLLM_CPU_KVCACHE_SPACE"] = str(recipe.rollout.kv_gib)
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # vLLM's sampler would have two small functions compiled, for 10 seconds of every start.
        env["TORCH_COMPILE_DISABLE"] = "1"
    return env


def sockets_env(facts: HostFacts) -> dict[str, str]:
    """Where vLLM has its own sockets. It never removes them: beside the run's weights they go when
    the run ends."""
    run_id = facts.run_dir.split("/")[-2]
    directory = f"{facts.weights_dir}/{run_id}"
    fits = len(directory.encode()) <= SOCKET_DIRECTORY
    return {"VLLM_RPC_BASE_PATH": directory} if fits else {}
