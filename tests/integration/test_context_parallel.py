"""Ranks that share each micro-batch against one process that has it alone.

The ranks of each world are started once and take one case after the other; a case is a row of
``CASES``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

np = pytest.importorskip("numpy", reason="needs the [cpu] extra")
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from accelerate.state import AcceleratorState  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from libra_cli.node.batch.samples import TokenSample, read_samples  # noqa: E402
from libra_cli.node.model import tiled_mlp  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.ranks import in_ranks, trainer_config  # noqa: E402
from tests.trainers import batch  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
CLOSE = 1e-5


class Case(NamedTuple):
    loss: str
    sharding: str = "fsdp2"
    again: str = "none"
    lora: bool = False
    kl: bool = False
    bonus: bool = False
    critic: bool = False
    """Whether hidden states before turns are looked at too."""
    tiled: bool = False


CASES = [
    Case("dapo", "fsdp2", "full"),
    Case("dapo", "ddp", "selective", lora=True, kl=True),
    Case("dapo", "fsdp2", lora=True, kl=True, bonus=True),
    Case("dapo", "ddp", "full", critic=True),
    Case("dapo", "fsdp2", "full", kl=True),
    Case("dapo", "ddp", "full", lora=True, kl=True),
    Case("bnpo", "ddp"),
    Case("grpo", "fsdp2", "selective", kl=True, bonus=True),
    Case("dr_grpo", "ddp", lora=True),
    Case("gspo", "fsdp2"),
    Case("cispo", "ddp", "full", bonus=True),
    Case("sapo", "fsdp2"),
    Case("distill", "fsdp2"),
    Case("tba", "ddp", kl=True),
    Case("tba", "fsdp2", lora=True, kl=True),
    Case("sft", "ddp", lora=True),
    Case("sft", "fsdp2", "full"),
    Case("dapo", "fsdp2", "full", kl=True, tiled=True),
    Case("dapo", "ddp", "full", lora=True, kl=True, tiled=True),
]
WORLDS = {
    "4 of 4": pytest.param(4, 4),
    "2 of 4": pytest.param(4, 2),
    "2 of 2": pytest.param(2, 2, marks=pytest.mark.nightly),
}
"""Ranks, and those that share a micro-batch."""


@dataclass(frozen=True)
class Found:
    """What a case came to; sums are over all generated tokens."""

    sums: dict[str, float]
    gradients: dict[str, Any]
    log_ratios: dict[Any, Any]
    probe: list[float]
    hidden: Any
    """Of the turns that any rank has looked at, in order; empty without a critic."""


def found_in(host: Path, model_dir: Path, cases: Sequence[Case], cp_size: int) -> list[Found]:
    return [found_of(host, model_dir, case, cp_size) for case in cases]


def found_of(host: Path, model_dir: Path, case: Case, cp_size: int) -> Found:
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    training = {
        "loss": case.loss,
        "sharding": case.sharding,
        "activation_checkpointing": case.again,
        "kl_coef": 1.0 * case.kl,
        "entropy_coef": 0.1 * case.bonus,
        "lora": {"rank": 4, "alpha": 8} if case.lora else None,
        "tiled_mlp": case.tiled,
        "micro_batch_tokens": 150,  # several on each rank, of one trajectory and more
    }
    tiled_mlp.TILE_TOKENS = 16
    world = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(trainer_config(host, model_dir, world, training, cp_size=cp_size))
    off_the_first(trainer, case.lora)
    samples = list(read_samples(batch(1), 128))
    if case.loss == "distill":
        samples = [judged(one) for one in samples]
    seen: dict[Any, Any] = {}
    if case.critic:
        samples = [replace(one, turns=turns_of(one)) for one in samples]
        samples = trainer.scored(samples, lambda here, hidden: seen.update(looked(here, hidden)))
        seen = {key: row for rank in trainer.gather(seen) for key, row in rank.items()}
    sums = trainer.gradients_of(samples)
    assert sums is not None
    ratios = {key: one for rank in trainer.gather(trainer.log_ratios) for key, one in rank.items()}
    hidden = np.stack([seen[key] for key in sorted(seen)]) if seen else np.zeros(0)
    return Found(sums, whole(trainer), ratios, trainer.logprobs_of(range(3, 60)), hidden)


def judged(sample: TokenSample) -> TokenSample:
    """The sample with an advantage of each token, as a teacher gives it."""
    random = np.random.default_rng([5, sample.group, sample.member])
    advantages = random.normal(size=len(sample.token_ids)).astype(np.float32)
    return replace(sample, advantages=(), token_advantages=advantages)


def off_the_first(trainer: Trainer, lora: bool) -> None:
    """Move the policy off the one that it started from, the same way on all ranks."""
    with torch.no_grad():
        for name, parameter in trainer.parameters().items():
            if lora and "lora_B" in name:
                parameter.add_(0.02)
            else:
                parameter.mul_(1.2)


def turns_of(sample: TokenSample) -> tuple[tuple[int, int, float], ...]:
    begins = (1, len(sample.token_ids) // 2, len(sample.token_ids) - 1)
    return tuple((turn, token, 0.0) for turn, token in enumerate(begins))


def looked(samples: Sequence[TokenSample], hidden: Any) -> dict[Any, Any]:
    keys = [(*one.trajectory, number) for one in samples for number, *_ in one.turns]
    return dict(zip(keys, hidden.numpy(), strict=True))


def whole(trainer: Trainer) -> dict[str, Any]:
    """The gradients, gathered."""
    gradients = {name: one.grad for name, one in trainer.parameters().items()}
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).numpy().copy()
        for name, one in gradients.items()
    }


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    new_model(build_tokenizer(), seed=0).save_pretrained(directory)
    save_tokenizer(build_tokenizer(), directory, max_len=POSITIONS)
    return directory


def in_a_world(tmp_path: Path, model_dir: Path, ranks: int, cp_size: int) -> list[list[Found]]:
    arguments = [(tmp_path, model_dir, CASES, cp_size)] * ranks
    return in_ranks([tmp_path] * ranks, found_in, arguments)


@pytest.fixture(scope="module")
def alone(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Found]:
    (found,) = in_a_world(tmp_path_factory.mktemp("one"), model_dir, 1, 1)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if case.tiled])
def test_tiles_change_nothing_on_one_rank_either(case: Case, alone: dict[Case, Found]):
    found, wanted = alone[case], alone[case._replace(tiled=False)]
    assert apart(found, wanted) < CLOSE
    assert found.sums == pytest.approx(wanted.sums, rel=CLOSE, abs=CLOSE)


@pytest.mark.parametrize(("ranks", "cp_size"), list(WORLDS.values()), ids=list(WORLDS))
def test_ranks_that_share_rows_find_what_one_finds_alone(
    ranks: int, cp_size: int, model_dir: Path, alone: dict[Case, Found], tmp_path: Path
):
    for rank in in_a_world(tmp_path, model_dir, ranks, cp_size):
        for case, found in zip(CASES, rank, strict=True):
            wanted = alone[case._replace(tiled=False)]
            assert apart(found, wanted) < CLOSE, case
            assert found.sums == pytest.approx(wanted.sums, rel=CLOSE, abs=CLOSE), case
            np.testing.assert_allclose(found.probe, wanted.probe, atol=CLOSE, rtol=0)
            np.testing.assert_allclose(found.hidden, wanted.hidden, atol=CLOSE, rtol=CLOSE)
            assert found.log_ratios.keys() == wanted.log_ratios.keys()
            for key, one in wanted.log_ratios.items():
                np.testing.assert_allclose(found.log_ratios[key], one, atol=1e-3)


def apart(found: Found, wanted: Found) -> float:
    """Norm of the difference of all gradients over the norm of those wanted."""
    assert found.gradients.keys() == wanted.gradients.keys()
    squares = [((found.gradients[n] - one) ** 2).sum() for n, one in wanted.gradients.items()]
    whole = [(one**2).sum() for one in wanted.gradients.values()]
    return math.sqrt(sum(squares) / sum(whole))
