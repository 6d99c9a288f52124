"""Whether the memory that a server and a rank share (``nodes[].share``) has their shares free, and
on a host without GPUs whether each fits its own; of GPUs ``gpu_memory`` says that."""

from __future__ import annotations

from collections.abc import Iterator

from libra_cli.config.recipe import NodeSpec, ShareSpec
from libra_cli.core.costs.memory import CPU_SERVER_GIB, GIB, served_bytes
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.launch.process import NUMBER_BYTES, dtype_of
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.findings import ALL, Finding, Remedy
from libra_cli.core.preflight.gpu_memory import shape_of
from libra_cli.core.preflight.host_report import NodeFacts
from libra_cli.core.preflight.needs import RANK_BYTES, TRAINED_BYTES

CHECK = "shares"
STEP = 0.05
"""Shares are proposed in multiples of this."""


def shares(case: PreflightCase) -> Iterator[Finding]:
    """Check every node whose slots share a GPU, or the host's memory."""
    for node, facts in case.looked():
        if node.share is not None:
            yield from _free(node, node.share, facts)
        if node.share is not None and not node.gpus:
            yield from _server(case, node, node.share, facts.mem_total)
            yield from _rank(case, node, node.share, facts.mem_total)
    yield Finding(CHECK, ALL, "fine", "what is shared is free")


def _free(node: NodeSpec, share: ShareSpec, facts: NodeFacts) -> Iterator[Finding]:
    """Compare what is free with the shares: vLLM 0.32 does not start with less than its own of the
    whole (``vllm/v1/worker/utils.py``, ``request_memory``)."""
    whole, free, what = facts.mem_total, facts.mem_free, "its memory"
    if node.gpus:
        known = [gpu for gpu in facts.gpus[: node.gpus] if gpu.mem_total]
        if not known:
            return
        gpu = min(known, key=lambda one: one.mem_free / one.mem_total)
        whole, free, what = gpu.mem_total, gpu.mem_free, f"GPU {gpu.device}"
    wanted = (share.rollout + share.train) * whole
    if free >= wanted:
        return
    scale = free / wanted
    less = [max(STEP, int(one * scale / STEP) * STEP) for one in (share.rollout, share.train)]
    yield Finding(
        CHECK,
        node.name,
        "stops" if node.gpus else "warns",
        f"{_gib(free)} of {_gib(whole)} of {what} are free, its shares are {_gib(wanted)} "
        f"({share.rollout:g} to serve, {share.train:g} to train)",
        "the server would not start, or the trainer run out of memory",
        Remedy(
            "recipe",
            f"nodes: {{host: {node.host}, share: {{rollout: {less[0]:.2g}, train: {less[1]:.2g}}}}}"
            ", or end what uses it",
        ),
    )


def _server(case: PreflightCase, node: NodeSpec, share: ShareSpec, whole: int) -> Iterator[Finding]:
    shape, recipe, width = shape_of(case), case.recipe, _width(case, node)
    need = CPU_SERVER_GIB * GIB
    if shape is not None:
        need += served_bytes(shape, recipe.rollout.quantization, width)
        need += shape.kv_bytes(width) * recipe.model.max_len
    if share.rollout * whole < need:
        yield Finding(
            CHECK,
            node.name,
            "stops",
            f"a server with one context takes {_gib(need)}, its share is {share.rollout:g} of "
            f"{_gib(whole)}",
            "it would not start",
            Remedy("recipe", "nodes: {share: {rollout: more}}, or a smaller model.max_len"),
        )


def _rank(case: PreflightCase, node: NodeSpec, share: ShareSpec, whole: int) -> Iterator[Finding]:
    shape = shape_of(case)
    if shape is None:
        return
    frozen = _width(case, node) * shape.parameters if shape.adapter is not None else 0.0
    need = RANK_BYTES + TRAINED_BYTES * shape.trained + frozen
    if share.train * whole < need:
        yield Finding(
            CHECK,
            node.name,
            "warns",
            f"a rank takes {_gib(need)} before its first batch, its share is {share.train:g} of "
            f"{_gib(whole)}",
            "nothing holds it to its share: processes would be killed, or the host would swap",
            Remedy("recipe", "nodes: {share: {train: more}}, or training: {lora: {}}"),
        )


def _width(case: PreflightCase, node: NodeSpec) -> int:
    """Return the bytes of a number that is computed with on a node."""
    slots = (slot for slot in slots_of(case.recipe) if slot.node == node.name)
    return NUMBER_BYTES[dtype_of(case.recipe.model, slots)]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
