"""A real trainer that leaves tokens over the staleness bound out of its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("accelerate", reason="needs the [cpu] extra")

import torch

from libra_cli.config.errors import TrainerError
from libra_cli.config.training import TrainingSpec
from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.node.model.warmup import POSITIONS, new_model
from libra_cli.node.trainer.config import TrainerConfig
from libra_cli.node.trainer.trainer import Trainer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
MASK = TrainingSpec.model_validate({"max_staleness": 1, "staleness": "token"})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0).save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory


@pytest.fixture
def trainer(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return Trainer(
        TrainerConfig(
            run_id="run",
            model_dir=str(model_dir),
            weights_dir=str(tmp_path / "weights"),
            checkpoint_dir=str(tmp_path / "checkpoints"),
            socket="",
            world_size=1,
            trainer_incarnation=0,
            seed=1,
            dtype="float32",
            temperature=1.0,
            training=MASK,
            max_len=64,
        )
    )


def batch(behind: tuple[tuple[int, int], ...]) -> list[TokenSample]:
    rng = np.random.default_rng(3)
    mask = np.array([0] * 5 + [1] * 20, dtype=np.int8)
    return [
        TokenSample(
            group=0,
            member=member,
            token_ids=rng.integers(4, 260, len(mask), dtype=np.int32),
            logprobs=np.where(mask, np.float32(-5.5), np.float32(0)),
            loss_mask=mask,
            reward=float(member % 2),
            advantages=((0, 2.0 * (member % 2) - 1),),
            fresh=False,
            behind=behind,
        )
        for member in range(4)
    ]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in trainer.whole_weights()}


def gradients(trainer: Trainer, samples: Sequence[TokenSample]) -> dict[str, torch.Tensor]:
    """Per counted token."""
    tokens = trainer.accumulate(samples)["tokens"]
    found = {
        name: one.grad.clone() / tokens
        for name, one in trainer.parameters().items()
        if one.grad is not None
    }
    trainer.clear_gradients()
    trainer._tokens, trainer._left_out, trainer._sums = 0, 0, {}
    return found


def test_a_masked_token_is_as_if_it_had_not_been_generated(trainer: Trainer) -> None:
    old_from_15 = batch(((15, 2),))
    cut = [
        replace(one, loss_mask=one.loss_mask * (np.arange(25) < 15), behind=())
        for one in old_from_15
    ]
    masked, wanted = gradients(trainer, old_from_15), gradients(trainer, cut)
    assert any(float(one.abs().sum()) > 0 for one in wanted.values())
    for name, one in masked.items():
        torch.testing.assert_close(one, wanted[name])


def test_a_batch_of_old_tokens_only_leaves_the_weights_as_they_are(trainer: Trainer) -> None:
    trainer.train(1, batch(()))
    before = weights(trainer)
    metrics = trainer.train(2, batch(((0, 5),)))
    assert metrics["generated_tokens"] == 0
    assert metrics["grad_norm"] == 0.0
    assert trainer.step == 2
    for name, one in weights(trainer).items():
        assert torch.equal(one, before[name]), name


def test_a_batch_in_which_nothing_was_generated_is_still_an_error(trainer: Trainer) -> None:
    empty = [replace(one, loss_mask=one.loss_mask * 0) for one in batch(())]
    with pytest.raises(TrainerError, match="no generated token"):
        trainer.train(1, empty)
