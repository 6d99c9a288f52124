"""Compiled decoder layers compute what plain ones do, and nobody outside of them sees a difference.

The backend is ``aot_eager``: graphs are made, parted into forward and backward and guarded as they
are for GPUs, and then run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.core.costs.architecture import DenseTransformer  # noqa: E402
from libra_cli.node.batch.samples import read_samples  # noqa: E402
from libra_cli.node.model import compiled  # noqa: E402
from libra_cli.node.trainer import checkpoint  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.trainers import batch, config_of, relative_difference  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
EPSILON = 2.0**-8
"""Half the distance of neighbouring numbers in bfloat16, relative to them."""
ROW = 100
"""Tokens of the row of which it is counted what is kept."""
Make = Callable[..., Trainer]


def fresh_state() -> None:
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.fixture
def make(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()  # of graphs that other tests have left
    fresh_state()

    def made(precision: str = "no", **training: Any) -> Trainer:
        AcceleratorState._reset_state()
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        return Trainer(config_of(model_dir, tmp_path / "run", training))

    yield made
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    fresh_state()


def gradients_of(trainer: Trainer) -> dict[str, Any]:
    """Of one batch in several micro-batches of other lengths, whole."""
    assert trainer.gradients_of(read_samples(batch(1), 128)) is not None
    gradients = {name: one.grad for name, one in trainer.parameters().items()}
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in gradients.items()
    }


@pytest.mark.parametrize(
    ("precision", "training", "most"),
    [
        ("no", {"activation_checkpointing": "none"}, 1e-5),
        ("no", {"activation_checkpointing": "full", "sharding": "fsdp2"}, 1e-5),
        ("bf16", {"activation_checkpointing": "selective", "sharding": "fsdp2"}, 12 * EPSILON),
        ("bf16", {"lora": {"rank": 4}}, 12 * EPSILON),
    ],
)
def test_gradients_are_those_of_plain_layers_by_one_graph_for_all_rows(
    precision: str, training: dict[str, Any], most: float, make: Make, record_property: Any
):
    training = {"micro_batch_tokens": 80, **training}
    wanted = gradients_of(make(precision, **training))
    one, before = make(precision, compile=True, **training), compiled.CLOCK.graphs
    gap = relative_difference(gradients_of(one), wanted)
    record_property("apart", gap)
    assert gap < most
    # Another for the row that is as long as a side of the model, if there is one.
    assert compiled.CLOCK.graphs - before in (1, 2)


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_what_inductor_makes_of_layers_has_the_gradients_of_plain_ones(
    make: Make, monkeypatch: pytest.MonkeyPatch, record_property: Any
):
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    wanted = gradients_of(make(micro_batch_tokens=160))
    gap = relative_difference(gradients_of(make(compile=True, micro_batch_tokens=160)), wanted)
    record_property("apart", gap)
    assert 0 < gap < 1e-5, "other kernels round otherwise"


def kept_bytes(trainer: Trainer) -> int:
    """Bytes that autograd keeps of a forward pass, but for the weights."""
    kept = dict[int, int]()
    weights = {one.untyped_storage().data_ptr() for one in trainer.model.parameters()}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    row = torch.arange(3, 3 + ROW)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.model.get_decoder()(input_ids=row, use_cache=False)
    return sum(size for place, size in kept.items() if place not in weights)


def test_selective_keeps_the_products_and_nothing_else(make: Make):
    one = make(compile=True, activation_checkpointing="selective")
    shape = DenseTransformer.from_config(one.model.config.to_dict())
    wanted = ROW * shape.layers * shape.kept_bytes("selective", width=4)
    assert kept_bytes(one) == pytest.approx(wanted, rel=0.02)
    assert wanted < 0.6 * ROW * shape.layers * shape.kept_bytes("none", width=4)


def test_a_step_is_published_saved_and_resumed_under_the_same_names(make: Make, tmp_path: Path):
    training = {"kl_coef": 0.1}  # a first policy, whose layers are compiled too
    plain, one = make(**training), make(compile=True, **training)
    told = [trainer.train(1, read_samples(batch(1), 128)) for trainer in (plain, one)]
    assert told[1]["loss"] == pytest.approx(told[0]["loss"], rel=1e-5)
    assert "compile_s" not in told[0]
    assert 0 < told[1]["compile_s"] < told[1]["update_s"]
    saved = checkpoint.save(one, tmp_path / "checkpoints", ledger={"step": 1}, keep=1)
    again = make(**training)
    checkpoint.load(again, saved, [])
    told = [trainer.train(2, read_samples(batch(2), 128)) for trainer in (plain, one, again)]
    assert "compile_s" not in told[1]
    wanted = dict(plain.whole_weights())
    for trainer in (one, again):
        assert list(trainer.parameters()) == list(plain.parameters())
        found = dict(trainer.whole_weights())
        assert list(found) == list(wanted)
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-4)


def test_memory_that_runs_out_in_a_compiled_layer_halves_micro_batches(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    one = make(compile=True, micro_batch_tokens=160)
    wanted = make(micro_batch_tokens=80)
    loss, times = one._loss, iter([True])

    def short(inputs: Any) -> Any:
        if next(times, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(inputs)

    monkeypatch.setattr(one, "_loss", short)
    told = [trainer.train(1, read_samples(batch(1), 128)) for trainer in (one, wanted)]
    assert one.micro_batch_tokens == 80
    assert told[0]["loss"] == pytest.approx(told[1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [(torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError), (KeyError(), None)],
)
def test_an_error_while_a_layer_is_compiled_says_what_to_type(
    raised: Exception, wanted: type[Exception] | None, make: Make, monkeypatch: pytest.MonkeyPatch
):
    def backend(graph: Any, inputs: Any) -> Any:
        raise raised

    monkeypatch.setattr(compiled, "BACKEND", backend)
    with pytest.raises(wanted or TrainerError) as caught:
        make(compile=True)  # which is asked for two tokens
    assert wanted is not None or getattr(caught.value, "hint", "") == compiled.OFF


@pytest.mark.parametrize("change", ["experts", "dropout"])
def test_models_whose_layers_are_not_compiled_are_refused(change: str):
    from libra_cli.node.model.tokenizer import build_tokenizer
    from libra_cli.node.model.warmup import new_model

    experts = 4 if change == "experts" else None
    model: Any = new_model(build_tokenizer(), seed=0, width=64, experts=experts)
    if change == "dropout":
        model.config.attention_dropout = 0.1
    told = {"experts": "it is a mixture of experts", "dropout": "it drops attention at random"}
    with pytest.raises(TrainerError, match=told[change]) as caught:
        compiled.compile_layers(model)
    assert caught.value.hint == "set training.compile: false"
