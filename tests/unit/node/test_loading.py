"""A gradient worker's weights are the version's, or it says which tensor does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.gradient.loading import load_version  # noqa: E402
from libra_cli.node.model.policy import PolicyModel  # noqa: E402
from libra_cli.node.model.weight_names import TensorGroup  # noqa: E402
from libra_cli.node.weights.chunks import MANIFEST  # noqa: E402
from libra_cli.node.weights.tensor_rows import whole  # noqa: E402
from libra_cli.node.weights.versions import ProbeResult, publish  # noqa: E402


class OneRank:
    """As much of ``PolicyModel`` as loading asks for."""

    def __init__(self) -> None:
        self.tensors = {"norm.weight": torch.zeros(3), "head.weight": torch.zeros(2, 3)}

    def published(self) -> tuple[TensorGroup, ...]:
        return tuple(
            TensorGroup((name,), {name: tuple(tensor.shape)})
            for name, tensor in self.tensors.items()
        )

    def named_once(self) -> dict[str, Any]:
        return self.tensors

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def logprobs_of(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)


@pytest.fixture
def version(tmp_path: Path) -> Path:
    tensors = {"norm.weight": torch.ones(3), "head.weight": torch.arange(6.0).view(2, 3)}
    found = publish(
        whole((name, tensor.bfloat16()) for name, tensor in tensors.items()),
        tmp_path,
        version=6,
        trainer_incarnation=1,
        probe=ProbeResult([5, 6, 7], [-1.0, -1.5]),
        keep=2,
    )
    return tmp_path / found.name


def test_every_tensor_is_loaded_and_the_gap_is_the_probe_s_mean_difference(version: Path):
    policy = OneRank()
    assert load_version(cast(PolicyModel, policy), version) == pytest.approx(0.25)
    assert policy.tensors["norm.weight"].tolist() == [1, 1, 1]
    assert policy.tensors["head.weight"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert policy.tensors["head.weight"].dtype == torch.float32


def rename(policy: OneRank, _: Path) -> None:
    policy.tensors["head.bias"] = policy.tensors.pop("head.weight")


def reshape(policy: OneRank, _: Path) -> None:
    policy.tensors["head.weight"] = torch.zeros(3, 2)


def lose_a_file(_: OneRank, version: Path) -> None:
    (version / "model-00000.safetensors").unlink()


def damage(_: OneRank, version: Path) -> None:
    (version / MANIFEST).write_text(json.dumps({"version": 6}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (rename, "head.bias is in the model, not in the version"),
        (reshape, r"head.weight is \[2, 3\] there and \[3, 2\] here"),
        (lose_a_file, "cannot be read: FileNotFoundError"),
        (damage, "cannot be read: KeyError"),
    ],
)
def test_a_version_that_does_not_fit_is_refused_by_the_tensor_s_name(
    version: Path, spoil: Callable[[OneRank, Path], None], reason: str
):
    policy = OneRank()
    spoil(policy, version)
    with pytest.raises(TrainerError, match=reason):
        load_version(cast(PolicyModel, policy), version)
