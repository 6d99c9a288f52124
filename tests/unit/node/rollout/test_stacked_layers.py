"""Which rows of a server's stacked layer are which published layer's."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.rollout import held_convolutions  # noqa: E402
from libra_cli.node.rollout.held_tensors import _packed_parts, _stacked  # noqa: E402


def rows(names: list[str], shards: list[tuple[int, int]], wholes: list[int]) -> list[Any]:
    """Name, rows in the stack and rows in the published layer, of each part."""
    found = _stacked(names, shards, wholes)
    return [(one.name, one.held.start, one.held.stop, one.rows) for one in found]


def test_two_layers_are_one_above_the_other():
    assert rows(["gate", "up"], [(0, 6), (0, 6)], [6, 6]) == [
        ("gate", 0, 6, (0, 6)),
        ("up", 6, 12, (0, 6)),
    ]


def test_a_rank_has_its_share_of_each_part_of_one_layer():
    assert rows(["qkv"], [(1, 4), (1, 2), (1, 2)], [8, 4, 4]) == [
        ("qkv", 0, 4, (4, 8)),
        ("qkv", 4, 6, (10, 12)),
        ("qkv", 6, 8, (14, 16)),
    ]


def test_a_layer_of_several_parts_may_be_stacked_with_another():
    names = ["qkv", "qkv", "qkv", "z"]
    assert rows(names, [(1, 2), (1, 2), (1, 3), (1, 3)], [4, 4, 6, 6]) == [
        ("qkv", 0, 2, (2, 4)),
        ("qkv", 2, 4, (6, 8)),
        ("qkv", 4, 7, (11, 14)),
        ("z", 7, 10, (3, 6)),
    ]


def test_layers_that_are_not_stacked_so_are_left_out():
    assert rows(["qkv", "z"], [(0, 2)] * 4, [2] * 4) == []


def test_vllm_s_own_mapping_says_how_many_parts_a_layer_has():
    model = torch.nn.Module()
    model.packed_modules_mapping = {"all": ["qkv", "z"], "ba": ["b", "a"]}
    stacked = {".qkv": (".all", (0, 1, 2)), ".z": (".all", 3), ".b": (".ba", 0)}
    model.hf_to_vllm_mapper = SimpleNamespace(orig_to_new_stacked=stacked)
    assert _packed_parts(model) == {"all": ["qkv", "qkv", "qkv", "z"], "ba": ["b", "a"]}


def test_a_convolution_is_read_back_from_the_order_of_its_kernel(monkeypatch: pytest.MonkeyPatch):
    def pack(weight: Any) -> Any:  # pairs of columns of 32 channels are neighbours
        return weight.view(-1, 32, 2, 2).transpose(1, 2).contiguous()

    ops = SimpleNamespace(causal_conv1d_weight_pack=pack)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", ops)
    held_convolutions._places.cache_clear()
    weight = torch.randn(320, 4, dtype=torch.bfloat16)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(pack(weight), requires_grad=False)
    assert held_convolutions.in_order(layer).shape == (10, 2, 32, 2), "it is in the files' order"
    setattr(layer, held_convolutions.COPY, torch.zeros_like(weight))
    assert torch.equal(held_convolutions.in_order(layer), weight), "and not the copy"
    held_convolutions._places.cache_clear()
