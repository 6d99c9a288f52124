"""Ranks that share a batch have one critic: that of a lone rank, to the last of a million."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from libra_cli.node.batch.samples import read_samples  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.node.trainer import checkpoint  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.credentials import credentials_of  # noqa: E402
from tests.ranks import in_world  # noqa: E402
from tests.trainers import batch, with_turns  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
GAE = {"advantage": "gae", "gamma": 0.9, "lam": 0.8, "learning_rate": 1e-4}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0, width=64).save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "credentials.json").write_text(credentials_of().as_json())
    made = tmp_path / "host"
    made.mkdir()
    return made


def steps(trainer: Trainer, host: Path) -> tuple[list[float], dict[str, Any], list[float]]:
    """The critic after three steps, of which the last goes on from a checkpoint; what that step
    tells; and what the policy then thinks of the probe."""
    for step in (1, 2):
        trainer.train(step, read_samples(with_turns(batch(step)), max_len=128))
    path = checkpoint.save(trainer, host / "checkpoints", ledger={"step": 2}, keep=1)
    assert trainer.critic is not None
    trainer.critic.head.weights.data.zero_()
    checkpoint.load(trainer, path)
    metrics = trainer.train(3, read_samples(with_turns(batch(3)), max_len=128))
    weights: list[float] = trainer.critic.head.weights.tolist()
    named = {name: metrics[name] for name in ("value_loss", "explained_variance", "advantages")}
    return weights, named, list(trainer.probe().logprobs)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_ranks_have_the_critic_of_one(host: Path, model_dir: Path, sharding: str):
    training = {**GAE, "sharding": sharding}
    ((wanted, told, thinks),) = in_world([host], model_dir, steps, training=training)
    first, second = in_world([host, host], model_dir, steps, training=training)
    assert first == second
    weights, named, probed = first
    assert max(map(abs, wanted)) > 0.1
    assert weights == pytest.approx(wanted, abs=1e-6)
    assert probed == pytest.approx(thinks, abs=1e-5)
    assert named["value_loss"] == pytest.approx(told["value_loss"], rel=1e-6)
    assert named["explained_variance"] == pytest.approx(told["explained_variance"], rel=1e-5)
    for (*who, values), (*whom, others) in zip(
        named["advantages"], told["advantages"], strict=True
    ):
        assert who == whom
        assert values == pytest.approx(others, abs=2e-4)  # told to four digits
