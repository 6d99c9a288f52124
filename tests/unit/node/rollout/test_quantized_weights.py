"""Weights in fewer bits: how they are rounded, and which are refused; vLLM's own are elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.rollout.number_formats import (  # noqa: E402
    FLOAT8,
    INT8,
    NumberFormat,
    multiplies_int8,
)
from libra_cli.node.rollout.proof import prove  # noqa: E402
from libra_cli.node.rollout.quantized_weights import (  # noqa: E402
    QuantizedWeights,
    blocks_of,
    unreadable,
)
from libra_cli.node.weights.checksum import checksum, described  # noqa: E402

NAME = "q.weight"


@pytest.mark.parametrize(
    ("known", "right"),
    [
        ({"architecture": "x86_64", "avx2": True}, False),
        ({"architecture": "x86_64", "avx512_vnni": True}, True),
        ({"architecture": "x86_64", "avx_vnni": True}, True),
        ({"architecture": "aarch64"}, True),
    ],
)
def test_an_x86_multiplies_int8_right_with_vnni_alone(monkeypatch, known, right):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert multiplies_int8() == right


def weight(seed: int = 0) -> Any:
    """Rows of very different sizes, as trained layers have them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(24, 40, generator=generator) * torch.logspace(-3, 1, 24)[:, None]
    return rows.to(torch.bfloat16)


def held(layer: Any) -> dict[str, Any]:
    """What a worker says that a layer of 24 rows and 40 columns holds."""
    ((_, _, block),) = blocks_of(layer, slice(None))
    value = f"{checksum(block):016x}"
    return {"name": NAME, "source": "q", "region": [0, 24, 0, 40], "checksum": value}


def layer_of(numbers: Any, *, pad: int = 0) -> Any:
    """A layer as vLLM makes it of a weight; some kernels pad it."""
    scale = (numbers.abs().amax(-1, keepdim=True).float() / 448).clamp_min(1 / (448 * 512))
    eighth = (numbers / scale).to(torch.float8_e4m3fn)
    if pad:
        eighth = torch.nn.functional.pad(eighth.float(), (0, pad, 0, pad)).to(eighth.dtype)
        scale = torch.nn.functional.pad(scale, (0, 0, 0, pad), value=1.0)
    return SimpleNamespace(
        weight=eighth.t(),
        weight_scale=scale,
        output_size_per_partition=numbers.shape[0],
        input_size_per_partition=numbers.shape[1],
    )


def given(tensors: dict[str, Any], published: dict[str, Any]) -> QuantizedWeights:
    manifest = {name: described(one) for name, one in published.items()}
    found = QuantizedWeights(tensors.items(), manifest, {NAME: FLOAT8}, torch.device("cpu"))
    assert [(name, one is tensors[name]) for name, one in found] == [(n, True) for n in tensors]
    return found


def test_every_number_is_the_nearest_of_its_row_and_the_largest_is_kept():
    exact, near = weight().float(), FLOAT8.rounded(weight())
    largest = exact.abs().amax(-1, keepdim=True)
    assert torch.equal(near.abs().amax(-1, keepdim=True), largest)
    # Three bits behind the first, and of small numbers what 2**-10 in units of the scale is.
    allowed = torch.maximum(exact.abs() / 16, largest / 448 * 2**-10)
    assert ((near - exact).abs() <= allowed * (1 + 1e-6)).all()
    assert (near != exact).float().mean() > 0.5


def test_integers_are_a_127th_of_their_row_s_largest_number_apart():
    exact, near = weight().float(), INT8.rounded(weight())
    step = exact.abs().amax(-1, keepdim=True) / 127
    assert torch.equal((near / step).round().abs().amax(-1), torch.full((24,), 127.0))
    assert ((near - exact).abs() <= step / 2 * (1 + 1e-5)).all()
    scale = torch.ones(1, 1)
    halves = torch.tensor([[0.5, 1.5, -2.5, 200.0, -200.0]])
    assert INT8.nearest(halves, scale).tolist() == [[0, 2, -2, 127, -127]]


@pytest.mark.parametrize("held_in", [FLOAT8, INT8])
def test_a_row_of_zeros_stays_one(held_in: NumberFormat):
    assert torch.equal(held_in.rounded(torch.zeros(2, 3, dtype=torch.bfloat16)), torch.zeros(2, 3))


@pytest.mark.parametrize("pad", [0, 8])
def test_what_a_layer_was_made_of_is_proved_and_another_is_not(pad: int):
    found = given({NAME: weight()}, {NAME: weight()})
    assert prove(found.expected, [[held(layer_of(weight(), pad=pad))]]).different == ()
    stale = prove(found.expected, [[held(layer_of(weight(1), pad=pad))]])
    assert stale.different == (f"{NAME} is not the one that was published (q)",)


def test_other_tensors_are_expected_as_they_were_published():
    norm = torch.ones(4, dtype=torch.bfloat16)
    found = given({"norm.weight": norm, NAME: weight()}, {"norm.weight": norm, NAME: weight()})
    assert found.expected["norm.weight"] == described(norm)
    assert found.expected[NAME]["dtype"] == "float32"
    assert found.wrong == []


def test_a_bit_that_rounding_hides_is_told_of():
    other = weight()
    other.view(torch.int16)[0, 0] ^= 1
    assert torch.equal(FLOAT8.rounded(other), FLOAT8.rounded(weight()))
    found = given({NAME: other}, {NAME: weight()})
    assert found.wrong == [f"{NAME} is not the trainer's"]


def test_a_tensor_that_does_not_come_is_told_of():
    published = {NAME: weight(), "norm.weight": torch.ones(4)}
    found = given({"norm.weight": published["norm.weight"]}, published)
    assert found.wrong == [f"{NAME} is not in the version"]


def test_a_kernel_that_keeps_another_order_is_named():
    layer = SimpleNamespace(weight=torch.zeros(2, 2, dtype=torch.int32))
    layer.quant_method = SimpleNamespace(fp8_linear=object())
    assert "vLLM's kernel object keeps weights in an order" in unreadable(layer)
    assert unreadable(layer_of(weight())) == ""
