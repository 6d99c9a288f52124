"""The loss and its gradient against TRL's own, on one fixed batch and one real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
pytest.importorskip("trl", reason="needs the [test] extra")

from libra_cli.config.training import TrainingSpec  # noqa: E402
from libra_cli.node.batch.samples import TokenSample  # noqa: E402
from libra_cli.node.losses.protocol import LossInputs, loss_of  # noqa: E402
from libra_cli.node.model.batching import collate  # noqa: E402
from libra_cli.node.model.scoring import ScoringModel  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.node.trainer.config import TrainerConfig  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(180),
    # TRL warns about the vLLM it finds; neither generates anything here.
    pytest.mark.filterwarnings("ignore"),
]
ROWS, PROMPT, COMPLETION = 6, 5, 40
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            # A fresh model is nearly uniform, and everything agrees on nothing.
            parameter.mul_(3)
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory


def samples() -> list[TokenSample]:
    """Multi-turn rows of several lengths: prompt, then generated and tool tokens alternating."""
    rng = np.random.default_rng(5)
    made = []
    for row in range(ROWS):
        length = PROMPT + int(rng.integers(10, COMPLETION + 1))
        mask: NDArray[np.int8] = np.zeros(length, dtype=np.int8)
        mask[PROMPT:] = (np.arange(length - PROMPT) // 4) % 2 == 0
        logprobs = np.where(mask, -rng.random(length) * 8, 0).astype(np.float32)
        token_ids = rng.integers(3, 268, length).astype(np.int32)
        made.append(TokenSample(0, row, token_ids, logprobs, mask, 0.0, False))
    return made


def trl_inputs(batch: list[TokenSample], **flat: Any) -> dict[str, Any]:
    """The same rows as TRL holds them. Flat vectors go where the generated tokens are."""
    width = max(len(sample.token_ids) for sample in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    real, generated = torch.zeros_like(ids), torch.zeros(ids.shape, dtype=torch.bool)
    for row, sample in enumerate(batch):
        length = len(sample.token_ids)
        ids[row, :length] = torch.from_numpy(sample.token_ids.astype(np.int64))
        real[row, :length] = 1
        generated[row, :length] = torch.from_numpy(sample.loss_mask != 0)

    def spread(values: Any) -> Any:
        full = torch.zeros(ids.shape)
        full[generated] = values
        return full[:, PROMPT:]

    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": real[:, :PROMPT],
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": real[:, PROMPT:],
        "tool_mask": generated[:, PROMPT:].long(),
        **{name: spread(values) for name, values in flat.items()},
        "num_items_in_batch": generated.sum(),
    }


def make_trainer(
    model: Any, model_dir: Path, directory: Path, settings: TrainingSpec, **arguments: Any
) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=GRPOConfig(
            output_dir=str(directory),
            **{
                "beta": settings.kl_coef,
                "epsilon": settings.clip_low,
                "epsilon_high": settings.clip_high,
                **arguments,
            },
            temperature=TEMPERATURE,
            per_device_train_batch_size=ROWS,
            num_generations=ROWS,
            gradient_accumulation_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "start ab hops 1"}] * ROWS),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
    )
    # Set where TRL would generate: its loss multiplies the importance weights only then.
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.current_gradient_accumulation_steps = 1
    return trainer


SEQUENCE = {"importance_sampling_level": "sequence"}


@pytest.mark.parametrize(
    ("ours_of", "theirs_of"),
    [
        ({}, {"loss_type": "dapo"}),
        ({"kl_coef": 0.05}, {"loss_type": "dapo"}),
        ({"loss_args": {"delta": 1.5}}, {"loss_type": "dapo", "delta": 1.5}),
        ({"loss": "bnpo"}, {"loss_type": "bnpo"}),
        ({"loss": "grpo"}, {"loss_type": "grpo"}),
        ({"loss": "grpo", "loss_args": SEQUENCE}, {"loss_type": "grpo", **SEQUENCE}),
        (
            {"loss": "gspo", "loss_args": {"epsilon": 0.1, "epsilon_high": 0.2}},
            {"loss_type": "grpo", **SEQUENCE, "epsilon": 0.1, "epsilon_high": 0.2},
        ),
        (
            {"loss": "dr_grpo", "loss_args": {"max_completion_length": 40}},
            {"loss_type": "dr_grpo", "max_completion_length": 40},
        ),
        (
            {"loss": "cispo", "loss_args": {"epsilon_high": 1.3}},
            {"loss_type": "cispo", "epsilon_high": 1.3},
        ),
        ({"loss": "sapo"}, {"loss_type": "sapo"}),
    ],
    ids=lambda given: "-".join(map(str, given.values())) or "default",
)
def test_loss_and_gradient_agree_with_trl(
    model_dir: Path, tmp_path: Path, ours_of: dict[str, Any], theirs_of: dict[str, Any]
):
    from transformers import AutoModelForCausalLM

    given = {"sampler_correction": "token_truncate"} | ours_of
    settings = TrainingSpec(clip_low=0.2, clip_high=0.28, **given)
    model, theirs_model = (
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
        for _ in range(2)
    )
    rows = samples()
    advantages = torch.linspace(-1.5, 1.5, ROWS)
    rows = [
        replace(row, advantages=((0, value),))
        for row, value in zip(rows, advantages.tolist(), strict=True)
    ]
    batch = collate(rows, torch.device("cpu"))
    scoring = ScoringModel(model, model, torch.device("cpu"))
    current, *_ = scoring.logprobs(batch.request, temperature=TEMPERATURE)
    generator = torch.Generator().manual_seed(1)
    # Policies far enough apart that the clip and the truncation both bite, on both sides.
    old = current.detach() + 0.3 * torch.randn(current.shape, generator=generator)
    rollout = old + 0.6 * torch.randn(current.shape, generator=generator)
    reference = old + 0.2 * torch.randn(current.shape, generator=generator)

    inputs = LossInputs(
        logprobs=current,
        proximal=old,
        rollout=rollout,
        advantages=batch.advantages,
        trajectories=batch.rows,
        groups=batch.groups,
        staleness=batch.ages,
        over=batch.ages > 1,
        max_len=PROMPT + COMPLETION,
        reference=reference if settings.kl_coef else None,
    )
    share = loss_of(settings)(inputs)
    ours = share.loss / (len(current) if share.divisor is None else share.divisor)
    ours.backward()
    our_gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    assert 0.05 < float(share.metrics["clip_fraction"]) / len(current) < 0.8

    trainer = make_trainer(theirs_model, model_dir, tmp_path, settings, **theirs_of)
    theirs_in = {
        "advantages": advantages,
        **trl_inputs(
            rows,
            old_per_token_logps=old,
            ref_per_token_logps=reference,
            importance_sampling_ratio=torch.exp(old - rollout).clamp(max=2.0),
        ),
    }
    theirs = trainer._compute_loss(trainer.model, theirs_in)
    theirs.backward()
    their_gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double()

    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    difference = (our_gradient - their_gradient).norm() / their_gradient.norm()
    assert float(difference) < 1e-5


def test_the_loss_of_demonstrations_agrees_with_trls_sft_trainer(model_dir: Path, tmp_path: Path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    model, theirs_model = (
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
        for _ in range(2)
    )
    rows = samples()
    batch = collate(rows, torch.device("cpu"))
    scoring = ScoringModel(model, model, torch.device("cpu"))
    current, _, greedy = scoring.logprobs(batch.request, temperature=1.0)
    inputs = LossInputs(
        logprobs=current,
        proximal=current.detach(),
        rollout=batch.rollout,
        advantages=batch.advantages,
        trajectories=batch.rows,
        groups=batch.groups,
        staleness=batch.ages,
        over=batch.ages > 1,
        max_len=PROMPT + COMPLETION,
        greedy=greedy,
    )
    outputs = loss_of(TrainingSpec(loss="sft"))(inputs)
    ours = outputs.loss / len(current)
    ours.backward()
    our_gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    trainer = SFTTrainer(
        model=theirs_model,
        args=SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, max_length=None, report_to=[]
        ),
        train_dataset=Dataset.from_list([{"text": "start ab hops 1"}] * ROWS),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
    )
    width = max(len(row.token_ids) for row in rows)
    ids, labels = torch.zeros(ROWS, width, dtype=torch.long), torch.full((ROWS, width), -100)
    for number, row in enumerate(rows):
        tokens = torch.from_numpy(row.token_ids.astype(np.int64))
        ids[number, : len(tokens)] = tokens
        labels[number, : len(tokens)][row.loss_mask != 0] = tokens[row.loss_mask != 0]
    theirs_in = {"input_ids": ids, "labels": labels, "attention_mask": (ids > 0).long()}
    count = (labels[:, 1:] != -100).sum()
    theirs = trainer.compute_loss(trainer.model, theirs_in, num_items_in_batch=count)
    theirs.backward()
    their_gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double()

    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    difference = (our_gradient - their_gradient).norm() / their_gradient.norm()
    assert float(difference) < 1e-5
    (accuracy,) = trainer._metrics["train"]["mean_token_accuracy"]
    assert float(outputs.metrics["token_accuracy"]) / len(current) == pytest.approx(accuracy)


def test_the_second_of_two_updates_on_a_batch_agrees_with_trl(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """``epochs: 2`` beside ``num_iterations=2``, with plain gradient descent in between."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    rate, rows = 2e-2, samples()
    advantages = torch.linspace(-1.5, 1.5, ROWS)
    settings = TrainingSpec(
        sampler_correction="token_truncate",
        epochs=2,
        max_grad_norm=1e9,
        learning_rate=rate,
        scale_rewards="none",
        max_staleness=8,
    )
    ours = Trainer(
        TrainerConfig(
            run_id="run",
            model_dir=str(model_dir),
            weights_dir=str(tmp_path / "weights"),
            checkpoint_dir=str(tmp_path / "checkpoints"),
            socket="",
            world_size=1,
            trainer_incarnation=0,
            seed=0,
            dtype="float32",
            temperature=TEMPERATURE,
            training=settings,
            max_len=PROMPT + COMPLETION,
        )
    )
    ours.optimizer = torch.optim.SGD(ours.parameters().values(), lr=rate)
    clip, seen = ours._clip, list[tuple[Any, list[Any]]]()

    def kept(most: float) -> Any:
        parameters = list(ours.parameters().values())
        gradient = torch.cat([p.grad.flatten() for p in parameters]).double()
        seen.append((gradient, [p.detach().clone() for p in parameters]))
        return clip(most)

    monkeypatch.setattr(ours, "_clip", kept)
    given = [
        replace(one, advantages=((0, float(a)),)) for one, a in zip(rows, advantages, strict=True)
    ]
    metrics = ours.train(1, given)

    theirs_model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    trainer = make_trainer(
        theirs_model, model_dir, tmp_path, settings, loss_type="dapo", num_iterations=2
    )
    batch = collate(rows, torch.device("cpu"))
    scoring = ScoringModel(theirs_model, theirs_model, torch.device("cpu"))
    with torch.no_grad():
        old, *_ = scoring.logprobs(batch.request, temperature=TEMPERATURE)
    weights = torch.exp(old - batch.rollout).clamp(max=2.0)
    theirs_in = trl_inputs(rows, old_per_token_logps=old, importance_sampling_ratio=weights)
    losses = []
    for our_gradient, weights_then in seen:
        # Rounding of the first update is not what is compared in the second.
        with torch.no_grad():
            for parameter, one in zip(trainer.model.parameters(), weights_then, strict=True):
                parameter.copy_(one)
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, {"advantages": advantages, **theirs_in})
        loss.backward()
        gradients = [p.grad.flatten() for p in trainer.model.parameters()]
        their_gradient = torch.cat(gradients).double()
        difference = (our_gradient - their_gradient).norm() / their_gradient.norm()
        assert float(difference) < 1e-5
        losses.append(float(loss.detach()))
    assert len(losses) == 2
    assert metrics["clip_fraction"] > 0.01
    assert abs(metrics["ppo_kl"]) > 1e-3
    assert metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
