"""A model of Qwen3's shape that has learned to count, which needs no download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from libra_cli.core.costs.architecture import PUBLISHED, DenseTransformer
from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer

HEAD = 128
REAL = PUBLISHED["Qwen3-0.6B"]
SMALL = DenseTransformer(4, 256, 256, 128, 512, 1003, tied=True)
"""Its vocabulary is no multiple of what vLLM pads to."""


@dataclass(frozen=True)
class Size:
    """What the checks are made with: on a GPU, or small enough for two cores."""

    shape: DenseTransformer
    tokens: int
    """Of a micro-batch."""
    head: int = HEAD
    steps: int = 20
    """In which the model learns to count."""
    seats: int = 64
    """Turns at once of a server."""
    turns: int = 512
    """Turns of the check of a server's speed."""
    loads: int = 30
    """Loads while turns run."""


ON_GPU = Size(REAL, 8192)
REHEARSED = Size(SMALL, 480, head=32, turns=128, loads=10)


def build(size: Size, directory: Path, device: str) -> None:
    """A Hugging Face directory of a model that counts modulo its vocabulary, in bfloat16."""
    shape = size.shape
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query // size.head,
        num_key_value_heads=shape.key // size.head,
        head_dim=size.head,
        max_position_embeddings=max(512, size.tokens),
        tie_word_embeddings=shape.tied,
    )
    model = Qwen3ForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 / shape.hidden)
    for _ in range(size.steps):
        start = torch.randint(0, shape.vocabulary, (4, 1))
        tokens = ((start + torch.arange(32) * 7) % shape.vocabulary).to(device)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to("cpu", torch.bfloat16).save_pretrained(directory)
    save_tokenizer(build_tokenizer(), directory, max_len=512)


def batch(
    size: Size, seed: int, scored: Callable[[Sequence[int]], Sequence[float]]
) -> list[TokenSample]:
    """Trajectories of half, a quarter, an eighth ... of the tokens, 85 % of them generated.

    ``scored`` tells the log-probabilities of a text's tokens but the first, in nats. The model that
    trains says how likely they were: a ratio far from 1 is clipped, and nothing would be learned.
    """
    rng = np.random.default_rng(seed)
    found: list[TokenSample] = []
    left = size.tokens
    while left >= 32:
        length = left // 2
        left -= length
        mask = (np.arange(length) >= length * 0.15).astype(np.int8)
        tokens = rng.integers(4, size.shape.vocabulary, length, dtype=np.int32)
        told = np.array([0.0, *scored(tokens.tolist())], dtype=np.float32)
        found.append(
            TokenSample(
                group=0,
                member=len(found),
                token_ids=tokens,
                logprobs=np.where(mask, told, np.float32(0)),
                loss_mask=mask,
                reward=float(len(found) % 2),
                advantages=((0, 2.0 * (len(found) % 2) - 1),),
                fresh=True,
            )
        )
    return found
