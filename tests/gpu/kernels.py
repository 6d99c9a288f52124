"""What runs in other kernels on a GPU than on a CPU: the output layer, attention, checksums."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from libra_cli.node.model.logprobs import chosen_logprobs, token_logprobs
from libra_cli.node.model.packed_attention import PackedSequences, packed_attention
from libra_cli.node.weights.checksum import checksum
from tests.gpu.model import Size
from tests.gpu.place import Place

FEW = 512
"""Tokens of a comparison in float32."""


def timed(device: str, work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of the second call, and GiB that it took at its peak (0 on a CPU)."""
    work()
    gpu = device == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else 0
    began = time.monotonic()
    work()
    if gpu:
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    peak = torch.cuda.max_memory_allocated() - before if gpu else 0
    return seconds, peak / 2**30


def kernels(place: Place) -> dict[str, Any]:
    """All of them."""
    given = (place.device, place.size)
    return head(*given) | attention(*given) | checksums(*given)


def head(device: str, size: Size) -> dict[str, Any]:
    """The output layer in blocks beside whole logits: memory, seconds, gradients."""
    shape = size.shape

    def tensors(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, shape.hidden, device=device, dtype=dtype) / 8
        weight = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype) / 8
        targets = torch.randint(0, shape.vocabulary, (tokens,), device=device)
        return hidden.requires_grad_(), weight.requires_grad_(), targets

    def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs(hidden @ weight.T, targets, temperature=1.0)[0]

    def blocks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return chosen_logprobs(hidden, weight, targets, temperature=1.0)[0]

    def gradients(score: Callable[..., Tensor], given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        found = torch.autograd.grad(score(*given).sum(), given[:2])
        return torch.cat([one.flatten() for one in found])

    exact = tensors(FEW, torch.float32)
    wanted = gradients(whole, exact)
    error = float((gradients(blocks, exact) - wanted).norm() / wanted.norm())
    del exact, wanted
    large = tensors(size.tokens, torch.bfloat16)
    ours, theirs = (timed(device, partial(gradients, score, large)) for score in (blocks, whole))
    ratio = ours[1] / theirs[1] if theirs[1] else 0.0
    return {
        "head_error": error,
        "head_memory": ratio,
        "head_s": ours[0],
        "whole_head_s": theirs[0],
    }


def attention(device: str, size: Size) -> dict[str, Any]:
    """Packed attention (varlen on GPUs) beside each sequence by itself, in float32."""
    shape, lengths = size.shape, [size.tokens // 2, size.tokens // 4, size.tokens // 4]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    packed = PackedSequences(tuple(lengths), starts)
    torch.manual_seed(0)
    rows = [
        torch.randn(1, heads // size.head, sum(lengths), size.head, device=device)
        .bfloat16()
        .requires_grad_()
        for heads in (shape.query, shape.key, shape.key)
    ]
    exact = [one.detach().float().requires_grad_() for one in rows]

    def run(given: list[Tensor]) -> list[Tensor]:
        query, key, value = given
        output, _ = packed_attention(torch.nn.Module(), query, key, value, None, packed=packed)
        return [output, *torch.autograd.grad(output.float().square().sum(), given)]

    errors = [
        float((one.float() - wanted).detach().norm() / wanted.detach().norm())
        for one, wanted in zip(run(rows), run(exact), strict=True)
    ]
    seconds, gib = timed(device, lambda: run(rows))
    return {
        "attention_error": max(errors),
        "attention_tokens_per_s": sum(lengths) / seconds,
        "attention_gib": gib,
    }


def checksums(device: str, size: Size) -> dict[str, Any]:
    """The checksum of a matrix, computed where it is, beside the CPU's."""
    torch.manual_seed(0)
    matrix = torch.randn(size.shape.vocabulary, size.shape.hidden).bfloat16()
    there = matrix.to(device, copy=True)
    seconds, _ = timed(device, lambda: checksum(there))
    same = checksum(there) == checksum(matrix)
    there[-1, -1] += 1
    return {
        "checksums_equal": same and checksum(there) != checksum(matrix),
        "checksum_gb_per_s": 2 * matrix.numel() / seconds / 1e9,
    }
