"""Fifty steps with half of every gradient rounded on its way, beside the same without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from libra_cli.node.batch.samples import TokenSample, read_samples  # noqa: E402
from libra_cli.node.gradient.wire import to_float32  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.ranks import trainer_config  # noqa: E402
from tests.trainers import batch  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 50


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Operations are so small that two threads wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(trainer: Trainer, samples: list[TokenSample], dtype: str) -> Mapping[str, Any]:
    """The gradients of a worker that computes these, as they arrive."""
    trainer.clear_gradients()
    trainer.gradients_of(samples)
    found = {}
    for name, parameter in trainer.parameters().items():
        sent = parameter.grad.flatten()
        if dtype == "bfloat16":
            sent = sent.to(torch.bfloat16).view(torch.uint16)
        found[name] = to_float32(sent.numpy().tobytes(), dtype).copy()
    trainer.clear_gradients()
    return found


def trained(host: Path, model_dir: Path, dtype: str) -> tuple[Any, Any]:
    """Parameters before and after, flat, where a worker computes one of two groups."""
    training = {
        "sharding": "ddp",
        "micro_batch_tokens": 1000,
        # At an edge rounding decides on a whole weight: a mask has fewer tokens there than a clip.
        "sampler_correction": "token_mask",
    }
    trainer = Trainer(trainer_config(host, model_dir, 1, training))

    def whole() -> Any:
        return torch.cat([one.detach().flatten() for one in trainer.parameters().values()]).clone()

    before = whole()
    for step in range(1, STEPS + 1):
        samples = read_samples(batch(step, groups=2), 128)
        rows = rows_of(trainer, [one for one in samples if one.group == 1], dtype)
        own = trainer.gradients_of([one for one in samples if one.group == 0])
        assert own is not None
        trainer.add_gradients(rows)
        trainer._add(own, samples)
        trainer._update(step)
    return before, whole()


def test_rounding_what_workers_send_moves_the_policy_less_than_a_hundredth_of_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model_dir = tmp_path / "model"
    new_model(build_tokenizer(), seed=0, width=64).save_pretrained(model_dir)
    save_tokenizer(build_tokenizer(), model_dir, max_len=POSITIONS)
    before, wanted = trained(tmp_path, model_dir, "float32")
    _, found = trained(tmp_path, model_dir, "bfloat16")
    drift = float((found - wanted).norm() / (wanted - before).norm())
    record_property("drift", drift)
    assert drift < 0.01
