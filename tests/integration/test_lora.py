"""Low-rank adapters in real worlds: replicas, shards in bfloat16, a gradient worker, a resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
pytest.importorskip("peft", reason="needs the [cpu] extra")

from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from tests.trainers import (  # noqa: E402
    Trainer,
    batch,
    of_groups,
    relative_difference,
    trainer,
    worker,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]
SHARED: dict[str, Any] = {"kl_coef": 0.1, "lora": {"rank": 4, "alpha": 8}}
STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, so that the output layer is no tensor of its own."""
    directory = tmp_path_factory.mktemp("model")
    model = new_model(build_tokenizer(), seed=0)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(directory)
    save_tokenizer(build_tokenizer(), directory, max_len=POSITIONS)
    return directory


def adapter(core: Trainer) -> dict[str, Any]:
    tensors = core.parameters(STEPS[-1])
    assert all(".lora_" in name for name in tensors)
    return tensors


@pytest.fixture(scope="module")
def alone(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The adapter after the steps of a single process, in float32."""
    with trainer(tmp_path_factory.mktemp("alone") / "run", model_dir, **SHARED) as core:
        core.wait_ready()
        first, *_ = (core.step(number)["metrics"] for number in STEPS)
        assert abs(first["kl"]) < 1e-6
        found = adapter(core)
        assert core.stop() == 0
    return found


def test_replicas_with_a_gradient_worker_come_to_the_same_adapter(
    alone: dict[str, Any], model_dir: Path, tmp_path: Path
):
    with (
        trainer(tmp_path / "core", model_dir, processes=2, sharding="ddp", **SHARED) as core,
        worker(tmp_path / "worker", model_dir, **SHARED) as helper,
    ):
        core.wait_ready(), helper.wait_ready()
        report: dict[str, Any] = {}
        for number in STEPS:
            directory = core.versions / f"v{number - 1:06d}-e0"
            helper.load(directory)
            helper.share(number, of_groups(batch(number), 0, 2))
            core.send(number, batch(number), shares=[helper.offer(number, [0, 2])])
            (report,) = core.result(number)["metrics"]["shares"]
            assert report["used"], report
            assert report["bytes"] == sum(4 * one.numel() for one in alone.values())
        assert relative_difference(adapter(core), alone) < 1e-4
        assert core.stop() == helper.stop() == 0


@pytest.mark.parametrize(
    ("options", "within"),
    [
        ({"activation_checkpointing": "full"}, 1e-4),
        pytest.param(
            {"activation_checkpointing": "selective", "precision": "bf16"},
            0.2,
            marks=pytest.mark.nightly,
        ),
        pytest.param({"processes": 1, "precision": "bf16"}, 0.2, marks=pytest.mark.nightly),
    ],
)
def test_other_worlds_resume_and_come_to_the_same_adapter(
    alone: dict[str, Any],
    model_dir: Path,
    tmp_path: Path,
    options: Mapping[str, Any],
    within: float,
):
    given: dict[str, Any] = {"processes": 2, "sharding": "fsdp2", **SHARED, **options}
    with trainer(tmp_path / "first", model_dir, **given) as first:
        first.wait_ready()
        first.step(1)
        path = first.checkpoint(2, {})
        assert "sharded" in first.log.read_text()
        assert first.stop() == 0
    about = json.loads((path / "checkpoint.json").read_text())
    others = {"target_modules": ["all-linear"], "experts": False}
    assert about["adapter"]["lora"] == {**SHARED["lora"], **others}
    with trainer(tmp_path / "second", model_dir, resume=path, **given) as second:
        assert second.wait_ready()["published"]["version"] == 2
        second.step(3)
        assert relative_difference(adapter(second), alone) < within
        assert second.stop() == 0
