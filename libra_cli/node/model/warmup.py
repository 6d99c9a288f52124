"""Trains a new small model to play pointer-chase, on purpose not well.

It takes supervised steps on demonstrations in which the expert sometimes swaps the letters of a
key. The model learns both the game and the mistake: it succeeds in about a third of the episodes
when sampled at temperature 1, and in nearly all when greedy. Reinforcement learning then unlearns
the mistake within tens of steps, since it is one of two choices and not one among all keys.

The result depends on the seed only, on the same machine with the same number of threads.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from libra_cli.envs.pointer_chase import PointerChase, demonstration, prompt
from libra_cli.node.model.tokenizer import END, PAD, encode, observation_text, prompt_text, token_id

LAYERS, WIDTH, HEAD_DIM = 3, 128, 32
POSITIONS = 1024
CHOSEN = 2
"""The number of experts that a token is sent to, as wide together as the dense layer."""
SLIPS = 0.22
"""The probability that the expert swaps a key's letters."""
BATCH = 32
CUTS = 2
"""The number of parts into which a batch is cut by length, to waste less on padding."""
PEAK_RATE = 2e-3
RAMP_STEPS = 50
FINAL_SHARE = 0.1
"""The share of its peak to which the learning rate falls."""
LOG_EVERY = 25
log = logging.getLogger("libra.model")


def new_model(
    tokenizer: Tokenizer, seed: int, width: int = WIDTH, experts: int | None = None
) -> nn.Module:
    """Make a Qwen3 or, with ``experts``, a Qwen3-MoE with random weights.

    The usual width has 0.5M parameters. Its output layer is not tied to the embedding: vLLM on CPUs
    cannot reload a tied one.
    """
    torch.manual_seed(seed)
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    shape: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": width // HEAD_DIM // 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "attn_implementation": "sdpa",
    }
    model: Any
    if experts is None:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        shape |= {
            "num_experts": experts,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": 2 * width // CHOSEN,
            "norm_topk_prob": True,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=pad, do_sample=True, temperature=1.0
    )
    made: nn.Module = model
    return made


def warm_up(model: nn.Module, tokenizer: Tokenizer, *, seed: int, steps: int) -> None:
    """Train on the tokens that the expert says, with cross-entropy and AdamW.

    The learning rate rises linearly for ``RAMP_STEPS`` and then falls linearly.
    """
    rng = random.Random(f"warm-up {seed}")
    pad = token_id(tokenizer, PAD)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * _schedule(step, steps)
        loss = _step(model, [_demonstration(tokenizer, rng) for _ in range(BATCH)], pad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0 or step == steps:
            seconds = time.monotonic() - started
            log.info("warm-up step %d of %d: loss %.3f, %.0f s", step, steps, loss, seconds)
    model.eval()


def _schedule(step: int, steps: int) -> float:
    if step <= RAMP_STEPS:
        return step / RAMP_STEPS
    return 1 - (1 - FINAL_SHARE) * (step - RAMP_STEPS) / max(1, steps - RAMP_STEPS)


def _demonstration(tokenizer: Tokenizer, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return the token ids of an episode, and 1 for each that the expert said, else 0.

    The tasks are seeded apart from those of a run.
    """
    environment = PointerChase()
    seed = rng.randrange(2**62)
    task = environment.task(seed, 0)
    token_ids = encode(tokenizer, prompt_text(prompt(str(task["start"]), int(task["hops"]))))
    mask = [0] * len(token_ids)
    end = token_id(tokenizer, END)
    for said, read in demonstration(environment, task, seed, rng=rng, slips=SLIPS):
        spoken = [*encode(tokenizer, said), end]
        heard = encode(tokenizer, observation_text(read)) if read else []
        token_ids += spoken + heard
        mask += [1] * len(spoken) + [0] * len(heard)
    return token_ids, mask


def _step(model: nn.Module, demos: Sequence[tuple[list[int], list[int]]], pad: int) -> float:
    """Add the batch's gradient and return the mean loss of a token, in nats."""
    ordered = sorted(demos, key=lambda demo: len(demo[0]))
    tokens = sum(sum(mask) for _, mask in ordered)
    total = 0.0
    size = len(ordered) // CUTS
    for first in range(0, len(ordered), size):
        part = ordered[first : first + size]
        token_ids = _pad([ids for ids, _ in part], pad)
        spoken = _pad([mask for _, mask in part], 0)[:, 1:].bool()
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1][spoken]
        loss = nn.functional.cross_entropy(logits, token_ids[:, 1:][spoken], reduction="sum")
        (loss / tokens).backward()
        total += float(loss.detach())
    return total / tokens


def _pad(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
