"""The names of current families' files: loaded by transformers, and put back to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from libra_cli.config.errors import WeightsError  # noqa: E402
from libra_cli.node.model.weight_names import WeightNames, names_of, text_config  # noqa: E402
from libra_cli.node.weights.model_files import INDEX, shapes_in, tensors_in, weight_files  # noqa: E402
from tests.families import FAMILIES, Family, named_family  # noqa: E402

MIXTURE = named_family("Qwen3-MoE")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_is_published_is_what_the_files_have(family: Family, tmp_path: Path):
    held = family.write(tmp_path)
    files = dict(tensors_in(tmp_path))
    assert family.example in files or not family.example
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=text_config(tmp_path), dtype=torch.float32
    )
    loaded = model.state_dict()
    names = names_of(tmp_path)
    assert sorted(names.unused) == sorted(family.extra)
    published: dict[str, Any] = {}
    for group in names.groups:
        published |= group.to_disk({name: loaded[name] for name in group.memory})
    assert published.keys() == files.keys() - set(family.extra)
    for name, tensor in published.items():
        assert torch.equal(tensor, files[name]), name
    back: dict[str, Any] = {}
    for group in names.groups:
        back |= group.to_memory({name: files[name] for name in group.disk})
    assert back.keys() == held.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor, held[name]), name
        assert torch.equal(loaded[name], held[name]), name


def test_a_group_is_no_more_than_one_layer_s_experts(tmp_path: Path):
    MIXTURE.write(tmp_path)
    groups = [group for group in names_of(tmp_path).groups if group.conversion]
    assert sorted(len(group.disk) for group in groups) == [8, 8, 16, 16]
    assert {len(group.memory) for group in groups} == {1}


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (["model.norm.weight"], r"for example model\.norm\.weight"),
        (["model.layers.0.mlp.experts.3.up_proj.weight"], r"makes model\.layers\.0\.mlp\.experts"),
        (
            [f"model.layers.1.mlp.experts.7.{part}_proj.weight" for part in ("gate", "up")],
            r"gate_up_proj of the shape \[7, 64, 128\]",
        ),
    ],
)
def test_files_that_lack_a_tensor_are_refused_by_its_name(
    lost: list[str], told: str, tmp_path: Path
):
    MIXTURE.write(tmp_path)
    model, shapes = names_of(tmp_path).model, shapes_in(tmp_path)
    for name in lost:
        del shapes[name]
    with pytest.raises(WeightsError, match=told):
        WeightNames(model, shapes)


def test_the_index_says_which_files_are_the_model_s(tmp_path: Path):
    MIXTURE.write(tmp_path)
    files = weight_files(tmp_path)
    save_file({"layers.0.wq": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert weight_files(tmp_path) == files
    (tmp_path / INDEX).unlink()
    assert weight_files(tmp_path) == [tmp_path / "consolidated.safetensors", *files]


def test_files_of_a_tied_model_may_have_both_ends(tmp_path: Path):
    family = named_family("Qwen3, tied")
    family.write(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    place = tmp_path / index["weight_map"]["model.embed_tokens.weight"]
    files = load_file(place)
    files["lm_head.weight"] = files["model.embed_tokens.weight"].clone()
    save_file(files, place, metadata={"format": "pt"})
    names = names_of(tmp_path)
    published = [name for group in names.groups for name in group.disk]
    assert len(published) == len({*published})
    assert len({"lm_head.weight", "model.embed_tokens.weight"} & {*published}) == 1
    assert names.unused == []


def test_command_a_s_windows_are_those_of_its_servers(tmp_path: Path):
    named_family("Command A").write(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["sliding_window"]
    assert text_config(tmp_path).sliding_window == written + 1
    assert text_config(tmp_path).sliding_window == written + 1, "once, however often it is read"
