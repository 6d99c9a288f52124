"""What the doctor says of models that the trainer would end with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from safetensors.torch import save_file  # noqa: E402

from libra_cli.node.checks.model_names import report  # noqa: E402
from libra_cli.node.weights.model_files import tensors_in  # noqa: E402
from tests.families import named_family  # noqa: E402

SMALL = named_family("Qwen2.5")


def renamed(directory: Path, old: str, new: str) -> None:
    """A whole directory of which some tensors have other names."""
    SMALL.write(directory)
    tensors = {name.replace(old, new): one for name, one in tensors_in(directory)}
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors")


def described(directory: Path, **config: Any) -> dict[str, Any]:
    """What is said of a directory with this config.json and the weights of a small model."""
    SMALL.write(directory)
    (directory / "config.json").write_text(json.dumps(config))
    return report(directory)


def test_a_model_of_transformers_is_counted(tmp_path: Path):
    SMALL.write(tmp_path)
    count = len(list(tensors_in(tmp_path)))
    assert report(tmp_path) == {"model": "Qwen2ForCausalLM", "tensors": count, "unused": 0}


def test_a_foreign_name_is_told_beside_the_one_that_is_missing(tmp_path: Path):
    renamed(tmp_path, "0.mlp.down_proj", "0.mlp.w2")
    told = report(tmp_path)
    assert told["error"] == (
        "1 tensors of Qwen2ForCausalLM are not in the model's files, for example "
        "model.layers.0.mlp.down_proj.weight; they have model.layers.0.mlp.w2.weight, which it "
        "has not"
    )
    assert told["hint"].startswith("model.path: a directory with all weights")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "nobody_knows"}, "nobody_knows"),
        ({"model_type": "t5"}, "T5Config is no language model that generates"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "custom code"),
        ({}, "model_type"),
    ],
)
def test_a_model_that_transformers_has_not_is_told_with_what_to_take(
    config: dict[str, Any], word: str, tmp_path: Path
):
    told = described(tmp_path, **config)
    assert word in told["error"]
    assert "model.path: a model whose class is part of transformers" in told["hint"]


def test_files_that_are_cut_off_are_told(tmp_path: Path):
    SMALL.write(tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:20])
    told = report(tmp_path)
    assert told["error"].startswith(f"the weights in {tmp_path} cannot be read")
    assert "libra setup" in told["hint"]


def test_whatever_transformers_raises_is_the_answer(tmp_path: Path):
    SMALL.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": "four"}))
    assert report(tmp_path)["error"]
