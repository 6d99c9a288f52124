"""What libra uses of vLLM's inside, read in vLLM's sources: nothing is imported.

    python -m tests.vllm_names DIRECTORY

``DIRECTORY`` is an unpacked wheel of some release. It prints what is missing there: a module, a
name that ``node/rollout`` imports, or a member below, with the parameters that it is called with.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

OURS = Path(__file__).parents[1] / "libra_cli/node"
MEMBERS: dict[str, dict[str, tuple[str, ...]]] = {
    "v1/engine/core_client.py:InprocClient": {
        "__init__": ("executor_class", "log_stats", "executor_fail_callback"),
        "get_output": (),
        "add_request": ("request",),
        "abort_requests": ("request_ids",),
        "shutdown": (),
    },
    "model_executor/models/registry.py:_ModelRegistry": {
        "models": (),
        "register_model": ("model_arch", "model_cls"),
    },
    "model_executor/models/registry.py:_LazyRegisteredModel": {"load_model_cls": ()},
    "v1/engine/detokenizer.py:IncrementalDetokenizer": {
        "from_new_request": ("tokenizer", "request"),
        "update": ("new_token_ids", "stop_terminated"),
    },
    "v1/engine/core.py:EngineCore": {
        "pause_scheduler": ("mode", "clear_cache"),
        "resume_scheduler": (),
        "collective_rpc": ("method", "args", "kwargs"),
        "batch_queue": (),
        "scheduler": (),
    },
    "v1/core/sched/scheduler.py:Scheduler": {
        "set_pause_state": ("pause_state",),
        "has_requests": (),
        "get_request_counts": (),
        "get_kv_cache_usage": (),
        "running": (),
        "max_num_running_reqs": (),
        "dynamic_sd_lookup": (),
        "requests": (),
    },
    "v1/request.py:Request": {
        "request_id": (),
        "num_computed_tokens": (),
        "num_prompt_tokens": (),
        "spec_token_ids": (),
        "cache_salt": (),
        "block_hashes": (),
        "update_block_hashes": (),
    },
    "v1/engine/__init__.py:EngineCoreRequest": {
        "request_id": (),
        "prompt_token_ids": (),
        "mm_features": (),
        "sampling_params": (),
        "pooling_params": (),
        "arrival_time": (),
        "lora_request": (),
        "cache_salt": (),
        "data_parallel_rank": (),
        "priority": (),
    },
    "v1/engine/__init__.py:EngineCoreOutput": {
        "request_id": (),
        "new_token_ids": (),
        "new_logprobs": (),
        "new_prompt_logprobs_tensors": (),
        "finish_reason": (),
        "events": (),
        "routed_experts": (),
    },
    "v1/engine/__init__.py:EngineCoreOutputs": {"outputs": (), "scheduler_stats": ()},
    "v1/engine/__init__.py:EngineCoreEventType": {"PREEMPTED": (), "QUEUED": ()},
    "v1/core/sched/interface.py:PauseState": {"PAUSED_ALL": ()},
    "v1/metrics/stats.py:SchedulerStats": {"prefix_cache_stats": (), "spec_decoding_stats": ()},
    "sampling_params.py:SamplingParams": {
        "max_tokens": (),
        "temperature": (),
        "top_p": (),
        "stop_token_ids": (),
        "ignore_eos": (),
        "logprobs": (),
        "prompt_logprobs": (),
        "detokenize": (),
        "routed_experts_prompt_start": (),
        "output_kind": (),
    },
    "v1/worker/gpu_worker.py:Worker": {"reload_weights": (), "model_runner": (), "device": ()},
    "v1/worker/gpu_model_runner.py:GPUModelRunner": {
        "reload_weights": ("weights_iterator",),
        "get_model": (),
        "execute_model": ("scheduler_output",),
    },
    "v1/worker/gpu/model_runner.py:GPUModelRunner": {
        "reload_weights": (),
        "get_model": (),
        "execute_model": ("scheduler_output",),
    },
    "config/vllm.py:VllmConfig": {
        "use_v2_model_runner": (),
        "scheduler_config": (),
        "speculative_config": (),
    },
    "config/compilation.py:CompilationConfig": {"cudagraph_mode": ()},
    "config/scheduler.py:SchedulerConfig": {"async_scheduling": ()},
}
"""File and class, its members, and the parameters by which a method is called."""
MODULE_NAMES = {
    "v1/core/sched/output.py": ("strip_covered_mm_data",),
    "v1/sample/rejection_sampler.py": ("expand_batch_to_tokens",),
    "_custom_ops.py": ("rotary_embedding",),
    "envs.py": ("VLLM_USE_V2_MODEL_RUNNER",),
}
"""Functions that libra puts its own in the place of, and a variable that it sets."""


def missing(vllm: Path) -> Iterator[str]:
    """Yield what is not in the package at this directory."""
    for module, name in sorted(set(imported())):
        if name not in names_of(vllm, module):
            yield f"{module}.{name}"
    for file, names in MODULE_NAMES.items():
        bound = _bound(_parsed(vllm / file))
        yield from (f"{file}: {name}" for name in names if name not in bound)
    for place, members in MEMBERS.items():
        file, _, called = place.partition(":")
        there = _members(vllm, file, called)
        for name, parameters in members.items():
            if name not in there:
                yield f"{place}.{name}"
            elif lacking := set(parameters) - there[name]:
                yield f"{place}.{name}({', '.join(sorted(lacking))})"


def imported() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every import of vLLM in the node's code."""
    for file in OURS.rglob("*.py"):
        for node in ast.walk(_parsed(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)


def names_of(vllm: Path, module: str) -> set[str]:
    """Names of a module, and the modules in it."""
    place = vllm.joinpath(*module.split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    inside = {one.stem for one in place.glob("*") if one.suffix in ("", ".py")}
    return _bound(_parsed(file)) | inside if file.exists() else inside


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _bound(tree: ast.AST) -> set[str]:
    """Names that a module defines, imports or assigns, at any depth."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if "__getattr__" in names:  # platforms are chosen when first asked for, by such a function
        texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        names |= {text for text in texts if isinstance(text, str)}
    return names


def _members(vllm: Path, file: str, called: str) -> dict[str, set[str]]:
    """Members of a class and its bases in the same file, with parameters of methods."""
    classes = {
        node.name: node for node in _parsed(vllm / file).body if isinstance(node, ast.ClassDef)
    }
    found: dict[str, set[str]] = {}
    waiting = [called]
    while waiting and (node := classes.get(waiting.pop())):
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
        found = {**dict(_of_class(node)), **found}
    return found


def _of_class(node: ast.ClassDef) -> Iterator[tuple[str, set[str]]]:
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef(name=name, args=args):
                yield name, {one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                yield name, set()
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, set()
            case _:
                pass


if __name__ == "__main__":
    sys.exit("\n".join(missing(Path(sys.argv[1]) / "vllm")) or None)
