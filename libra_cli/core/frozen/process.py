"""The argv and the environment of a frozen model's server, which is vLLM's own.

``vllm serve`` has what judges and customers are asked by: chat templates, parsers of tool calls,
completions with the log-probabilities of a prompt. It listens on a Unix socket in a directory of
the run that only its user enters, so it needs no key and no port.
"""

from __future__ import annotations

from libra_cli.core.frozen.slots import FrozenSlot
from libra_cli.core.launch.process import (
    Flags,
    HostFacts,
    ProcessSpec,
    argv_of,
    common_env,
    compiler_caches,
    interface_env,
)
from libra_cli.core.launch.vllm import sockets_env


def frozen_process(frozen: FrozenSlot, facts: HostFacts, *, path: str) -> ProcessSpec:
    """Return the server's process; ``path`` is the model's directory on that host."""
    return ProcessSpec(
        node=frozen.node.name,
        process=frozen.process,
        argv=(
            *(facts.python, "-m", "libra_cli.node.frozen_model"),
            *argv_of(_flags(frozen, facts, path)),
            *frozen.model.vllm_args,
        ),
        env=_env(frozen, facts) | frozen.node.env,
    )


def _flags(frozen: FrozenSlot, facts: HostFacts, path: str) -> Flags:
    model, gpus = frozen.model, len(frozen.slot.gpus)
    return {
        "--uds": facts.socket_of(frozen.process),
        "--model": path,
        "--served-model-name": model.name,
        "--dtype": "bfloat16" if gpus else "float32",
        "--tensor-parallel-size": gpus or 1,
        **({} if model.max_len is None else {"--max-model-len": model.max_len}),
        **({} if gpus else {"--enforce-eager": None}),
    }


def _env(frozen: FrozenSlot, facts: HostFacts) -> dict[str, str]:
    env = {
        **common_env(frozen.node, [frozen.slot], facts),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        **interface_env("lo"),
        **sockets_env(facts),
    }
    if frozen.slot.gpus:
        return env | {"VLLM_CACHE_ROOT": f"{facts.workdir}/cache/vllm", **compiler_caches(facts)}
    return env | {
        "VLLM_CPU_KVCACHE_SPACE": str(frozen.model.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",  # as ``core.launch.vllm``
    }
