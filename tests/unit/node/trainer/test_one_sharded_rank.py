"""A rank that is alone computes as sharded ranks do: their attention, and FSDP2 if it is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from torch.distributed.fsdp._fully_shard import _fsdp_param_group  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from libra_cli.node.batch.samples import read_samples  # noqa: E402
from libra_cli.node.model import packed_attention  # noqa: E402
from libra_cli.node.model.pass_of_shards import in_reduction  # noqa: E402
from libra_cli.node.trainer import checkpoint  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.trainers import batch, config_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
EPSILON = 2.0**-8
"""Half the distance of neighbouring numbers in bfloat16, relative to them."""
Make = Callable[..., Trainer]


def fresh_state() -> None:
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.fixture
def make(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    fresh_state()

    def made(precision: str, **training: Any) -> Trainer:
        AcceleratorState._reset_state()
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        return Trainer(config_of(model_dir, tmp_path / "run", training))

    yield made
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    fresh_state()


def gradients_of(trainer: Trainer) -> dict[str, Any]:
    """Of one batch in several micro-batches, whole."""
    assert trainer.gradients_of(read_samples(batch(1), 128)) is not None
    gradients = {name: one.grad for name, one in trainer.parameters().items()}
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in gradients.items()
    }


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Norm of the difference over the norm of those wanted."""
    assert found.keys() == wanted.keys()
    squares = [float(((found[name] - one) ** 2).sum()) for name, one in wanted.items()]
    whole = [float((one**2).sum()) for one in wanted.values()]
    return math.sqrt(sum(squares) / sum(whole))


@pytest.mark.parametrize(("precision", "computed"), [("bf16", "bfloat16"), ("no", "float32")])
def test_attention_is_given_what_the_model_computes_in(
    precision: str, computed: str, make: Make, monkeypatch: pytest.MonkeyPatch
):
    seen: set[Any] = set()
    kernel = torch.nn.functional.scaled_dot_product_attention

    def recorded(*tensors: Any, **options: Any) -> Any:
        seen.update(one.dtype for one in tensors)
        return kernel(*tensors, **options)

    monkeypatch.setattr(packed_attention, "scaled_dot_product_attention", recorded)
    gradients_of(make(precision))
    assert seen == {getattr(torch, computed)}


def test_memory_that_runs_out_while_gradients_are_reduced_is_told_from_other_times(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    def without_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    one = make("no", sharding="fsdp2")
    for where, found in ((_fsdp_param_group, "foreach_reduce"), (one, "_loss")):
        with monkeypatch.context() as patch:
            patch.setattr(where, found, without_memory)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                gradients_of(one)
        assert in_reduction(caught.value) == (found == "foreach_reduce")
        one.model.reset_iter_state()


@pytest.mark.parametrize(
    ("precision", "again", "most"),
    [("bf16", "full", 12 * EPSILON), ("bf16", "selective", 12 * EPSILON), ("no", "full", 1e-5)],
)
def test_one_rank_of_fsdp2_has_the_gradients_of_one_under_autocast(
    precision: str, again: str, most: float, make: Make, record_property: Any
):
    wanted = gradients_of(make(precision, micro_batch_tokens=80))
    options = {"sharding": "fsdp2", "activation_checkpointing": again, "micro_batch_tokens": 80}
    one = make(precision, **options)
    assert all(isinstance(parameter, DTensor) for parameter in one.parameters().values())
    gap = apart(gradients_of(one), wanted)
    record_property("apart", gap)
    assert gap < most


def test_betas_that_a_recipe_changes_are_those_after_a_checkpoint(make: Make, tmp_path: Path):
    sharded = make("no", sharding="fsdp2")
    sharded.train(1, read_samples(batch(1), 128))
    saved = checkpoint.save(sharded, tmp_path / "checkpoints", ledger={"step": 1}, keep=1)
    for sharding in ("fsdp2", "ddp"):
        again = make("no", sharding=sharding, betas=(0.5, 0.6))
        checkpoint.load(again, saved, [])
        assert {group["betas"] for group in again.optimizer.param_groups} == {(0.5, 0.6)}


def test_one_rank_of_fsdp2_takes_steps_and_goes_on_from_a_checkpoint(make: Make, tmp_path: Path):
    plain, sharded = make("no"), make("no", sharding="fsdp2")
    for trainer in (plain, sharded):
        trainer.train(1, read_samples(batch(1), 128))
    saved = checkpoint.save(sharded, tmp_path / "checkpoints", ledger={"step": 1}, keep=1)
    for trainer in (plain, sharded):
        trainer.train(2, read_samples(batch(2), 128))
    again = make("no", sharding="fsdp2")
    checkpoint.load(again, saved, [])
    again.train(2, read_samples(batch(2), 128))
    wanted = dict(plain.whole_weights())
    for trainer in (sharded, again):
        found = dict(trainer.whole_weights())
        assert found.keys() == wanted.keys()
        rows = {one.name: one.tensor for one in trainer.written_weights(1)}
        for name, one in wanted.items():
            torch.testing.assert_close(found[name], one, atol=1e-6, rtol=1e-4)
            torch.testing.assert_close(rows[name], one, atol=1e-6, rtol=1e-4)
