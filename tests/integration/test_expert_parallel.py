"""Ranks that hold other experts of each layer: gradients, steps and files are those of one rank.

The ranks of each world are started once and take one case after the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="needs the [cpu] extra")
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from accelerate.state import AcceleratorState  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.gradient.server import GradientStore  # noqa: E402
from libra_cli.node.gradient.writer import GradientWriter  # noqa: E402
from libra_cli.node.http import Blob  # noqa: E402
from libra_cli.node.model.expert_parallel import is_parted  # noqa: E402
from libra_cli.node.trainer import checkpoint  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from libra_cli.node.weights.model_files import shapes_in  # noqa: E402
from tests.integration.test_mixtures import (  # noqa: E402
    CLOSE,
    Case,
    adapted_in,
    apart,
    gradients_in,
    meshes_of,
    model_dir,
    of_others,
    of_transformers,
    samples,
    with_routes,
)
from tests.ranks import in_ranks, trainer_config  # noqa: E402

__all__ = ["model_dir"]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
TWO = [
    Case("fsdp2", ep_size=2),
    Case("fsdp2", "full", 150, ep_size=2),
    Case("fsdp2", "selective", 60, ep_size=2),
]
FOUR = [
    Case("fsdp2", ep_size=4),
    Case("fsdp2", "full", 60, ep_size=2),
    Case("fsdp2", "full", 60, ep_size=2, dp_shard_size=2),
    Case("fsdp2", "selective", 1, ep_size=4),
]
WORLDS = [2, pytest.param(4, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("ranks", WORLDS)
def test_any_cut_of_a_batch_has_the_gradients_of_transformers(
    ranks: int, model_dir: Path, tmp_path: Path
) -> None:
    loss, wanted = of_transformers(model_dir)
    cases = TWO if ranks == 2 else FOUR
    arguments = [(tmp_path, model_dir, cases, samples())] * ranks
    for rank in in_ranks([tmp_path] * ranks, gradients_in, arguments):
        for case, (found_loss, found) in zip(cases, rank, strict=True):
            assert found_loss == pytest.approx(loss, rel=CLOSE), case
            assert apart(found, wanted) < CLOSE, case


@pytest.mark.nightly
def test_replayed_choices_have_the_gradients_of_one_rank(model_dir: Path, tmp_path: Path) -> None:
    given = with_routes(of_others)
    alone = (tmp_path, model_dir, [Case()], given)
    (((loss, wanted),),) = in_ranks([tmp_path], gradients_in, [alone])
    arguments = [(tmp_path, model_dir, TWO[1:2], given)] * 2
    for rank in in_ranks([tmp_path] * 2, gradients_in, arguments):
        ((found_loss, found),) = rank
        assert found_loss == pytest.approx(loss, rel=CLOSE)
        assert apart(found, wanted) < CLOSE


@pytest.mark.nightly
def test_an_adapter_on_experts_becomes_that_of_one_rank(model_dir: Path, tmp_path: Path) -> None:
    ((wanted,),) = in_ranks([tmp_path], adapted_in, [(tmp_path, model_dir, [Case()])])
    arguments = [(tmp_path, model_dir, TWO[1:2])] * 2
    for (found,) in in_ranks([tmp_path] * 2, adapted_in, arguments):
        assert apart(found, wanted) < 1e-4


def test_steps_versions_and_checkpoints_are_those_of_ranks_with_all_experts(
    model_dir: Path, tmp_path: Path
) -> None:
    shapes = shapes_in(model_dir)
    for found in in_ranks([tmp_path] * 2, played, [(tmp_path, model_dir)] * 2):
        together, parted, resumed = found["together"], found["parted"], found["resumed"]
        assert found["norms"][0] == pytest.approx(found["norms"][1], rel=CLOSE)
        assert found["norms"][0] > 1.0  # so that it was clipped
        assert {name: one.shape for name, one in parted.items()} == shapes
        assert apart(parted, together) < CLOSE
        assert apart(resumed["together"], parted) < CLOSE
        assert all(np.array_equal(resumed["parted"][name], one) for name, one in parted.items())


def trainer_of(host: Path, model_dir: Path, case: Case) -> Trainer:
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    world = int(os.environ["WORLD_SIZE"])
    training = {"warmup_steps": 0, "micro_batch_tokens": 100, "activation_checkpointing": "full"}
    return Trainer(trainer_config(host, model_dir, world, training, **meshes_of(case)))


def version_of(trainer: Trainer) -> dict[str, Any]:
    return {name: one.float().numpy().copy() for name, one in trainer.whole_weights()}


def played(host: Path, model_dir: Path) -> dict[str, Any]:
    """Two steps with all experts on each rank, and parted; and the second from a checkpoint."""
    cases = {"together": Case(), "parted": TWO[0]}
    trainers = {name: trainer_of(host, model_dir, case) for name, case in cases.items()}
    norms = [one.train(1, samples())["grad_norm"] for one in trainers.values()]
    parted = trainers["parted"]
    check_rows(parted)
    path = checkpoint.save(parted, host / "checkpoints", ledger={}, keep=2)
    for one in trainers.values():
        one.train(2, samples())
    resumed = {name: trainer_of(host, model_dir, case) for name, case in cases.items()}
    for one in resumed.values():
        checkpoint.load(one, path)
        one.train(2, samples())
    again = {name: version_of(one) for name, one in resumed.items()}
    check_written(parted)
    found = {name: version_of(one) for name, one in trainers.items()}
    return {"norms": norms, "resumed": again, **found}


def check_written(trainer: Trainer) -> None:
    """What a rank writes of a version, by itself or for the other, are rows of its tensors."""
    whole = version_of(trainer)
    for writers in (1, 2):
        for piece in trainer.written_weights(writers):
            rows = piece.tensor.detach().float().numpy()
            first = piece.first or 0
            assert np.array_equal(rows, whole[piece.name][first : first + len(rows)]), piece.name


def check_rows(trainer: Trainer) -> None:
    """The rows that a rank says it has are those that it has, and those that it is given are put
    there."""
    named: Sequence[tuple[str, Any]] = list(trainer.parameters().items())
    assert sum(is_parted(one) for _, one in named) >= 2
    whole = {name: one.detach().full_tensor() for name, one in named if isinstance(one, DTensor)}
    trainer.clear_gradients()
    rows = {}
    for name, parameter in named:
        start, stop = trainer.own_rows(parameter)
        assert torch.equal(parameter.detach().to_local(), whole[name][start:stop]), name
        rows[name] = whole[name][start:stop].reshape(-1).numpy()
    trainer.add_gradients(rows)
    for name, parameter in named:
        assert torch.equal(parameter.grad.full_tensor(), whole[name]), name
    trainer.clear_gradients()


@pytest.mark.nightly
def test_gradients_that_a_worker_serves_are_those_of_each_expert(
    model_dir: Path, tmp_path: Path
) -> None:
    in_ranks([tmp_path] * 4, check_served, [(tmp_path, model_dir)] * 4)


def check_served(host: Path, model_dir: Path) -> None:
    """What the ranks of a gradient worker write is read as the gradients that they hold."""
    policy = trainer_of(host, model_dir, TWO[0])
    store = None if policy.rank else GradientStore(incarnation=3)
    writer = GradientWriter(policy, store, host / "outbox", "float32")
    if store is not None:
        store.begin(1, "v1")
    writer.begin(1)
    policy.gradients_of(samples())
    writer.finish()
    whole = {name: one.grad.full_tensor() for name, one in policy.parameters().items()}
    if store is not None:
        for name, gradient in whole.items():
            about = {"incarnation": "3", "step": "1", "version": "v1"}
            _, found = store.gradient(about, name, 0, len(gradient))
            assert isinstance(found, Blob)
            assert found.data == gradient.numpy().tobytes(), name


@pytest.mark.nightly
def test_models_that_cannot_be_parted_are_refused(model_dir: Path, tmp_path: Path) -> None:
    told = in_ranks([tmp_path] * 3, refused, [(tmp_path, model_dir)] * 3)
    assert all("8 experts" in one and "parted over 3 ranks" in one for one in told)


def refused(host: Path, model_dir: Path) -> str:
    with pytest.raises(TrainerError) as caught:
        trainer_of(host, model_dir, Case(ep_size=3))
    return str(caught.value)
