"""Four ranks, however they share the model, against one process that computes in float32.

The ranks are started once and take one case after the other; each case is a row of ``CASES``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

np = pytest.importorskip("numpy", reason="needs the [cpu] extra")
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from accelerate.state import AcceleratorState  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from libra_cli.node.batch.samples import read_samples  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.ranks import in_ranks, trainer_config  # noqa: E402
from tests.trainers import batch  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
RANKS = 4
KL = 1.0
EPSILON = 2.0**-8
"""Half the distance of neighbouring numbers in bfloat16, relative to them."""


class Case(NamedTuple):
    shards: int = RANKS
    bf16: bool = False
    again: str = "none"
    tied: bool = False
    kl: bool = False

    @property
    def name(self) -> str:
        layout = f"{RANKS // self.shards}x{self.shards}"
        precision = "bf16" if self.bf16 else "fp32"
        words = [layout, precision, self.again, "tied" * self.tied, "kl" * self.kl]
        return "-".join(word for word in words if word)

    @property
    def alone(self) -> Case:
        """The same model and loss in one process, in float32."""
        return Case(1, tied=self.tied, kl=self.kl)


# Of five choices every pair of values is in some row.
CASES = [
    Case(4),
    Case(4, tied=True, kl=True, again="selective"),
    Case(4, bf16=True, again="full", kl=True),
    Case(4, bf16=True, again="selective", tied=True),
    Case(2, kl=True),
    Case(2, again="full", tied=True),
    Case(2, bf16=True, again="none", tied=True),
    Case(2, bf16=True, again="selective"),
    Case(2, bf16=True, again="full", tied=True, kl=True),
    Case(4, bf16=True, again="none", kl=True),
]
ALONE = sorted({case.alone for case in CASES})


@dataclass(frozen=True)
class Found:
    """Sums over all generated tokens."""

    sums: Mapping[str, float]
    gradients: Mapping[str, Any]
    norm: float
    added: float
    """How far at most off what was added is of which each rank was given its rows."""


def gradients(host: Path, models: Mapping[bool, Path], cases: Sequence[Case]) -> list[Found]:
    """Of one batch in every case, by a policy that is off the one it started from."""
    return [gradient(host, models[case.tied], case) for case in cases]


def gradient(host: Path, model_dir: Path, case: Case) -> Found:
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if case.bf16 else "no"
    training = {
        "activation_checkpointing": case.again,
        "kl_coef": KL * case.kl,
        "micro_batch_tokens": 80,  # several on each rank
        # At an edge rounding decides on a whole weight: a mask has fewer tokens there than a clip.
        "sampler_correction": "token_mask",
    }
    world = int(os.environ["WORLD_SIZE"])
    config = trainer_config(host, model_dir, world, training, dp_shard_size=case.shards)
    trainer = Trainer(config)
    with torch.no_grad():
        for parameter in trainer.parameters().values():
            parameter.mul_(1.2)  # so that there is a KL
    samples = read_samples(batch(1), config.max_len)
    half = len(samples) // 2
    first, second = (trainer.gradients_of(part) for part in (samples[:half], samples[half:]))
    assert first is not None
    assert second is not None
    found, sums = whole(trainer), {name: first[name] + second[name] for name in first}
    return Found(sums, found, float(trainer._clip(1e9)), added(trainer, found))


def whole(trainer: Trainer) -> dict[str, Any]:
    """The gradients, gathered."""
    gradients = {name: one.grad for name, one in trainer.parameters().items()}
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).numpy().copy()
        for name, one in gradients.items()
    }


def added(trainer: Trainer, before: Mapping[str, Any]) -> float:
    given = {
        name: np.linspace(0, 1, one.size, dtype=np.float32).reshape(one.shape)
        for name, one in before.items()
    }
    rows = {}
    for name, parameter in trainer.parameters().items():
        start, stop = trainer.own_rows(parameter)
        rows[name] = given[name][start:stop].flatten()
    trainer.add_gradients(rows)
    after = whole(trainer)
    return max(float(abs(after[n] - (one + given[n])).max()) for n, one in before.items())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    made = {}
    for tied in (False, True):
        directory = made[tied] = tmp_path_factory.mktemp("model")
        model = new_model(build_tokenizer(), seed=0)
        model.config.tie_word_embeddings = tied
        model.tie_weights()
        model.save_pretrained(directory)
        save_tokenizer(build_tokenizer(), directory, max_len=POSITIONS)
    return made


@pytest.fixture(scope="module")
def alone(models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Found]:
    host = tmp_path_factory.mktemp("one")
    (found,) = in_ranks([host], gradients, [(host, models, ALONE)])
    return dict(zip(ALONE, found, strict=True))


@pytest.fixture(scope="module")
def together(
    models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[Case, Found]]:
    hosts = [tmp_path_factory.mktemp("host")] * RANKS
    ranks = in_ranks(hosts, gradients, [(host, models, CASES) for host in hosts])
    return [dict(zip(CASES, found, strict=True)) for found in ranks]


def apart(found: Found, wanted: Found) -> float:
    """Norm of the difference of all gradients over the norm of those wanted."""
    assert found.gradients.keys() == wanted.gradients.keys()
    squares = [((found.gradients[n] - one) ** 2).sum() for n, one in wanted.gradients.items()]
    return math.sqrt(sum(squares)) / wanted.norm


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_gradients_and_losses_are_those_of_one_process_in_float32(
    case: Case,
    alone: dict[Case, Found],
    together: list[dict[Case, Found]],
    record_property: Any,
):
    wanted = alone[case.alone]
    gap = apart(together[0][case], wanted)
    record_property("apart", gap)
    # Rounding of a few operations in each of four layers, both ways, adds up like a random walk.
    assert gap < (12 * EPSILON if case.bf16 else 1e-5)
    for rank in together:
        found = rank[case]
        assert found.added < 1e-6
        assert found.norm == pytest.approx(wanted.norm, rel=4 * EPSILON if case.bf16 else 1e-5)
        assert found.sums.keys() == wanted.sums.keys()
        for name, most in {"entropy": EPSILON, "loss": 4 * EPSILON, "kl": 8 * EPSILON}.items():
            if name in wanted.sums:
                close = pytest.approx(wanted.sums[name], rel=most if case.bf16 else 1e-5)
                assert found.sums[name] == close, name


# -- several updates -------------------------------------------------------------------------------


def updates(host: Path, model_dir: Path, shardings: Sequence[str]) -> list[Found]:
    """What two passes of two minibatches come to, by plain gradient descent, for each sharding."""
    return [updated(host, model_dir, sharding) for sharding in shardings]


def updated(host: Path, model_dir: Path, sharding: str) -> Found:
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    training = {
        "sharding": sharding,
        "minibatches": 2,
        "epochs": 2,
        "entropy_coef": 0.02,
        "kl_coef": 0.1,
        "kl_in_reward": True,
        "micro_batch_tokens": 80,
        "learning_rate": 0.5,
        "warmup_steps": 0,
        "max_grad_norm": 1e9,
    }
    config = trainer_config(host, model_dir, int(os.environ["WORLD_SIZE"]), training)
    trainer = Trainer(config)
    with torch.no_grad():
        for parameter in trainer.parameters().values():
            parameter.mul_(1.2)
    trainer.optimizer = torch.optim.SGD(trainer.parameters().values(), lr=0.5)
    metrics = trainer.train(1, read_samples(batch(1), config.max_len))
    named = ("loss", "grad_norm", "ppo_kl", "kl", "entropy", "update_ratio")
    weights = {name: tensor.numpy().copy() for name, tensor in trainer.whole_weights()}
    return Found({name: metrics[name] for name in named}, weights, metrics["grad_norm"], 0.0)


def test_several_updates_are_those_of_one_process_however_ranks_share_the_model(
    models: dict[bool, Path], tmp_path: Path
):
    ((alone,),) = in_ranks([tmp_path], updates, [(tmp_path, models[False], ["ddp"])])
    shardings = ["ddp", "fsdp2"]
    ranks = in_ranks([tmp_path] * 2, updates, [(tmp_path, models[False], shardings)] * 2)
    for found in (one for rank in ranks for one in rank):
        for name, one in alone.gradients.items():
            np.testing.assert_allclose(found.gradients[name], one, atol=2e-5, rtol=0)
        for name, value in alone.sums.items():
            # What is sampled of a tensor to tell how far it moved depends on who holds it.
            off = 0.05 if name == "update_ratio" else 1e-3
            assert found.sums[name] == pytest.approx(value, rel=off), name
