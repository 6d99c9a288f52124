"""A step that cannot be taken as planned: not finite, too large for memory; and what decays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.batch.samples import TokenSample, read_samples  # noqa: E402
from libra_cli.node.losses.protocol import LossOutputs  # noqa: E402
from libra_cli.node.trainer.trainer import BUDGET_FILE, Trainer  # noqa: E402
from tests.trainers import batch, config_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def make(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Trainer]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def made(directory: str = "run", **training: Any) -> Trainer:
        home = tmp_path / directory
        return Trainer(config_of(model_dir, home, training))

    return made


def samples(step: int) -> tuple[TokenSample, ...]:
    return read_samples(msgpack.unpackb(msgpack.packb(batch(step))), max_len=128)


def weights(trainer: Trainer) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in trainer.parameters().items()}


def with_room_for(tokens: int, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory run out in the backward pass, when gradients are there, above so many tokens."""
    backward = trainer._backward

    def limited(micro_batch: Any, here: Any) -> dict[str, float]:
        sums = backward(micro_batch, here)
        if micro_batch.request.token_ids.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sums

    monkeypatch.setattr(trainer, "_backward", limited)


def test_memory_that_runs_out_halves_micro_batches_and_changes_no_result(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    roomy, tight = make(), make("tight")
    with_room_for(70, tight, monkeypatch)
    for trainer in (roomy, tight):
        trainer.accumulate(samples(1))
        told = trainer.train(1, samples(2))
        assert told["generated_tokens"] == sum(one.generated for one in (*samples(1), *samples(2)))
        smaller = trainer.micro_batch_tokens
        assert told.get("micro_batch_tokens") == (None if trainer is roomy else smaller)
    for name, one in weights(roomy).items():
        torch.testing.assert_close(weights(tight)[name], one, atol=2e-5, rtol=0)
    assert tight.micro_batch_tokens <= 70
    assert make("tight").micro_batch_tokens == tight.micro_batch_tokens
    tight._budget_file.write_text("")  # all that a full disk took of it
    assert make("tight").micro_batch_tokens == roomy.micro_batch_tokens
    assert (Path(tight.config.checkpoint_dir).parent / BUDGET_FILE).is_file()


def test_one_trajectory_that_is_too_much_by_itself_is_an_error_with_a_way_out(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make()
    with_room_for(10, trainer, monkeypatch)
    with pytest.raises(TrainerError, match=r"a trajectory of \d+ tokens by itself") as caught:
        trainer.train(1, samples(1))
    assert "activation_checkpointing" in caught.value.hint


def test_a_gradient_that_is_not_finite_is_skipped_and_three_in_a_row_are_an_error(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make()
    good = trainer._loss

    def bad(inputs: Any) -> LossOutputs:
        outputs = good(inputs)
        return replace(outputs, loss=outputs.loss * math.nan)

    before = weights(trainer)
    monkeypatch.setattr(trainer, "_loss", bad)
    assert [trainer.train(step, samples(step))["skipped_in_a_row"] for step in (1, 2)] == [1, 2]
    assert trainer.step == 2
    assert all(torch.equal(before[name], one) for name, one in weights(trainer).items())
    monkeypatch.setattr(trainer, "_loss", good)
    assert "skipped_in_a_row" not in trainer.train(3, samples(3))
    monkeypatch.setattr(trainer, "_loss", bad)
    trainer.train(4, samples(4))
    trainer.train(5, samples(5))
    with pytest.raises(TrainerError, match="step 6: the gradient was not finite") as caught:
        trainer.train(6, samples(6))
    assert "--resume" in caught.value.hint


def test_weight_decay_is_of_matrices_and_not_of_norms(make: Callable[..., Trainer]):
    trainer = make(weight_decay=0.5, warmup_steps=0, learning_rate=0.1)
    before = weights(trainer)
    # No advantage, so no gradient.
    alike = [replace(one, advantages=()) for one in samples(1)]
    trainer.train(1, alike)
    for name, one in weights(trainer).items():
        factor = 0.95 if one.ndim > 1 else 1.0
        torch.testing.assert_close(one, before[name] * factor)
