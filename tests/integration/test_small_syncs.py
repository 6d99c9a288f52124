"""A host that follows a trainer by what changed has, at every version, exactly its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("accelerate", reason="needs the [cpu] extra")

from libra_cli.config.training import TrainingSpec
from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.node.model.warmup import POSITIONS, new_model, warm_up
from libra_cli.node.trainer.config import TrainerConfig
from libra_cli.node.trainer.trainer import Trainer
from libra_cli.node.weights import files
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import publish
from libra_cli.node.weights.weight_server import WeightServer
from tests.credentials import credentials_of, url_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 5
PULL_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, seed=0)
    warm_up(model, tokenizer, seed=0, steps=3)
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory


@pytest.fixture
def trainer(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Trainer]:
    """The trainer's own, of one process, that publishes in bf16."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    config = TrainerConfig(
        run_id="run",
        model_dir=str(model_dir),
        weights_dir=str(tmp_path / "trainer"),
        checkpoint_dir=str(tmp_path / "checkpoints"),
        socket="",
        world_size=1,
        trainer_incarnation=0,
        seed=1,
        dtype="bfloat16",
        temperature=1.0,
        training=TrainingSpec.model_validate({"learning_rate": request.param}),
        max_len=128,
    )
    trainer = Trainer(config)
    yield trainer
    trainer.close()


def batch(step: int) -> list[TokenSample]:
    rng = np.random.default_rng(step)
    mask = np.array([0] * 10 + [1] * 20, dtype=np.int8)
    return [
        TokenSample(
            group=group,
            member=member,
            token_ids=rng.integers(4, 260, len(mask), dtype=np.int32),
            logprobs=np.where(mask, np.float32(-5.5), np.float32(0)),
            loss_mask=mask,
            reward=float(member % 2),
            advantages=((0, 2.0 * (member % 2) - 1),),
            fresh=True,
        )
        for group in range(2)
        for member in range(4)
    ]


@pytest.mark.parametrize(("trainer", "most"), [(1e-6, 0.1), (2e-4, 0.4)], indirect=["trainer"])
def test_every_step_of_the_real_trainer_arrives_bit_for_bit_in_few_bytes(
    trainer: Trainer, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "DELTA_S", PULL_S)  # however busy the machine is
    there = WeightServer(trainer.config.versions, credentials_of())
    here = WeightServer(tmp_path / "host" / "run", credentials_of())
    source = url_of(there.serve("127.0.0.1", 0))
    try:
        for step in range(STEPS + 1):
            if step:
                trainer.train(step, batch(step))
            published = publish(
                whole((name, one.bfloat16()) for name, one in trainer.whole_weights()),
                there.root,
                version=step,
                trainer_incarnation=0,
                probe=trainer.probe(),
                keep=2,
            )
            pulled = here.pull(published.name, [source], patience_s=PULL_S)
            assert pulled.kind == ("delta" if step else "full"), pulled.detail
            assert step == 0 or sum(pulled.sent_by.values()) < most * published.bytes
            for file in (there.root / published.name).iterdir():
                assert (Path(pulled.path) / file.name).read_bytes() == file.read_bytes()
    finally:
        here.close()
        there.close()
