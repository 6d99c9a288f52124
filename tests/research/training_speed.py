"""Tokens a second of a training step, beside TRL's GRPOTrainer, on the same batch and model.

    python -m tests.research.training_speed --layers 8 --width 512 --trajectories 48 --rounds 3

The batch is random: lengths are heavy-tailed (log-normal, cut at ``--longest``), a tenth is prompt
and a twentieth tools' returns, so 85 % are generated. Both take forward, backward, clipping and
AdamW in float32, in turns, with one thread; seconds are those of the process's own core, so that
what else the machine does is not counted. TRL is given what it has no way to do by itself: its
micro-batches, of as many rows as is fastest here, are cut to their own longest row. Prints a line
of JSON, with how far the two gradients' norms are apart.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from libra_cli.config.training import TrainingSpec
from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.trainer.config import TrainerConfig
from libra_cli.node.trainer.trainer import Trainer

VOCABULARY, GROUP, RATE = 4096, 8, 1e-5


def batch(arguments: Namespace) -> list[TokenSample]:
    """Trajectories; their log-probabilities are to be filled in."""
    random = np.random.default_rng(arguments.seed)
    samples = []
    for number in range(arguments.trajectories):
        length = int(np.clip(random.lognormal(5.5, 0.9), 32, arguments.longest))
        mask: NDArray[np.int8] = np.ones(length, dtype=np.int8)
        mask[: length // 10 + 1] = 0
        middle = length // 2
        mask[middle : middle + length // 20] = 0
        reward = float(random.normal())
        samples.append(
            TokenSample(
                group=number // GROUP,
                member=number % GROUP,
                token_ids=random.integers(3, VOCABULARY, length, dtype=np.int32),
                logprobs=np.zeros(length, dtype=np.float32),
                loss_mask=mask,
                reward=reward,
                advantages=((0, reward),),
                fresh=True,
            )
        )
    return samples


def model_directory(root: Path, layers: int, width: int) -> Path:
    """A random Qwen3 and a tokenizer without merges."""
    torch.manual_seed(0)
    heads = width // 64
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(root)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    words |= {f"w{number}": number for number in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(root)
    return root


def ours(root: Path, model: Path) -> Trainer:
    """The trainer as a recipe has it, alone in its world."""
    training = TrainingSpec(learning_rate=RATE, micro_batch_tokens=8192)
    with mock.patch.dict("os.environ", {"ACCELERATE_USE_CPU": "true"}):
        return Trainer(
            TrainerConfig(
                run_id="speed",
                model_dir=str(model),
                weights_dir=str(root / "versions"),
                checkpoint_dir=str(root / "checkpoints" / "here"),
                socket="",
                world_size=1,
                trainer_incarnation=1,
                seed=0,
                dtype="float32",
                temperature=1.0,
                training=training,
                max_len=4096,
            )
        )


def theirs(root: Path, model: Path) -> GRPOTrainer:
    """TRL's, with libra's loss, optimizer and clipping."""
    training = TrainingSpec()
    return GRPOTrainer(
        model=str(model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(root / "trl"),
            per_device_train_batch_size=GROUP,
            num_generations=GROUP,
            learning_rate=RATE,
            beta=0.0,
            epsilon=training.clip_low,
            epsilon_high=training.clip_high,
            loss_type="dapo",
            scale_rewards="none",
            max_grad_norm=training.max_grad_norm,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": "w3"}] * GROUP),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
    )


def padded(samples: Sequence[TokenSample], generated: int) -> dict[str, torch.Tensor]:
    """A micro-batch as TRL's loss takes it: prompts to the left, the rest to the right."""
    prompts = [int(np.argmax(one.loss_mask)) for one in samples]
    longest = max(prompts)
    rest = max(len(one.token_ids) - first for one, first in zip(samples, prompts, strict=True))
    shape = {"prompt": (len(samples), longest), "completion": (len(samples), rest)}
    made = {
        f"{side}_{what}": torch.zeros(size, dtype=torch.long)
        for side, size in shape.items()
        for what in ("ids", "mask")
    }
    made["tool_mask"] = torch.zeros(shape["completion"], dtype=torch.long)
    for row, (one, first) in enumerate(zip(samples, prompts, strict=True)):
        tokens = torch.from_numpy(one.token_ids.astype(np.int64))
        end = len(tokens) - first
        made["prompt_ids"][row, longest - first :] = tokens[:first]
        made["prompt_mask"][row, longest - first :] = 1
        made["completion_ids"][row, :end] = tokens[first:]
        made["completion_mask"][row, :end] = 1
        made["tool_mask"][row, :end] = torch.from_numpy(one.loss_mask[first:].astype(np.int64))
    made["advantages"] = torch.tensor([one.reward for one in samples])
    made["num_items_in_batch"] = torch.tensor(float(generated))
    return made


def their_step(trainer: GRPOTrainer, samples: Sequence[TokenSample], rows: int) -> float:
    """Take one step in micro-batches of so many rows, and return the gradient's norm."""
    generated = sum(one.generated for one in samples)
    ordered = sorted(samples, key=lambda one: -len(one.token_ids))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    for first in range(0, len(ordered), rows):
        made = padded(ordered[first : first + rows], generated)
        trainer._compute_loss(trainer.model, made).backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return float(norm)


def scored(trainer: Trainer, token_ids: list[int]) -> NDArray[np.float32]:
    """The policy's own log-probabilities, so that every ratio is 1 in the first step."""
    return np.asarray([0.0, *trainer.logprobs_of(token_ids)], dtype=np.float32)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of this process's core, and what came of it."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def main() -> None:
    """Measure as the command line says."""
    parser = ArgumentParser(description=__doc__)
    for name, value in {
        "layers": 8,
        "width": 512,
        "trajectories": 48,
        "longest": 2048,
        "rounds": 3,
        "seed": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        sys.stdout.write(json.dumps(measured(arguments, Path(directory))) + "\n")


def measured(arguments: Namespace, root: Path) -> dict[str, Any]:
    """Both, in turns; TRL with each size of micro-batch, of which the fastest counts."""
    model = model_directory(root / "model", arguments.layers, arguments.width)
    own, other = ours(root, model), theirs(root, model)
    other.create_optimizer()
    samples = [
        replace(one, logprobs=scored(own, one.token_ids.tolist())) for one in batch(arguments)
    ]
    tokens = sum(len(one.token_ids) for one in samples)
    sizes = (1, 2, 4, 8)
    spent: dict[str, list[float]] = {"libra": [], **{f"TRL, {rows} rows": [] for rows in sizes}}
    norms: dict[str, float] = {}
    for number in range(arguments.rounds):
        taken, metrics = seconds(partial(own.train, number + 1, samples))
        spent["libra"].append(taken)
        norms.setdefault("libra", metrics["grad_norm"])
        for rows in sizes:
            name = f"TRL, {rows} rows"
            taken, norm = seconds(partial(their_step, other, samples, rows))
            spent[name].append(taken)
            norms.setdefault("TRL", norm)
    rates = {name: round(tokens / statistics.median(taken)) for name, taken in spent.items()}
    best = max(rate for name, rate in rates.items() if name != "libra")
    return {
        "parameters": sum(one.numel() for one in other.model.parameters()),
        "tokens": tokens,
        "generated": round(sum(one.generated for one in samples) / tokens, 3),
        "tokens_per_core_second": rates,
        "of_the_fastest": round(rates["libra"] / best, 3),
        "first_gradient_norms": norms,
    }


if __name__ == "__main__":
    main()
