"""The balance of a mixture's routers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import (  # noqa: E402
    load_balancing_loss_func,
)

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.model.batching import collate  # noqa: E402
from libra_cli.node.model.routers import RouterBalance, balance_of, routers_of  # noqa: E402

TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def model_of(family, **more):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY | more))


def test_the_balance_of_one_sequence_is_transformers_loss():
    torch.manual_seed(0)
    logits = tuple(torch.randn(7, 8) for _ in range(3))
    wanted = load_balancing_loss_func(logits, num_experts=8, top_k=2)
    torch.testing.assert_close(balance_of(logits, (7,), 2), wanted[None])


def test_sequences_of_a_row_have_balances_of_their_own():
    torch.manual_seed(0)
    logits = [torch.randn(12, 8) for _ in range(2)]
    row = balance_of(logits, (5, 7), 2)
    first, second = ([one[part] for one in logits] for part in (slice(5), slice(5, 12)))
    torch.testing.assert_close(row[0], balance_of(first, (5,), 2)[0])
    torch.testing.assert_close(row[1], balance_of(second, (7,), 2)[0])
    whole = balance_of(logits, (12,), 2)
    assert not torch.isclose(whole[0], (5 * row[0] + 7 * row[1]) / 12, atol=1e-4)


def test_even_routers_have_the_least_balance():
    even = torch.zeros(8, 4)
    even[range(8), [0, 1, 2, 3] * 2] = 1.0
    uneven = torch.zeros(8, 4)
    uneven[:, 0] = 1.0
    assert balance_of([even], (8,), 1) == pytest.approx(1.0)
    assert balance_of([uneven], (8,), 1) > 1.5


@pytest.mark.parametrize(
    ("family", "experts", "dense"),
    [
        ("qwen3_moe", {"num_experts": 8, "mlp_only_layers": [0]}, 1),
        ("olmoe", {"num_experts": 8}, 0),
        ("mixtral", {"num_local_experts": 8}, 0),
        ("qwen3", {}, 3),
    ],
)
def test_the_routers_of_a_model_are_found_in_order(family, experts, dense):
    model = model_of(family, **experts)
    names = {id(part): name for name, part in model.named_modules()}
    found = [names[id(router)] for router in routers_of(model)]
    assert found == [f"model.layers.{number}.mlp.gate" for number in range(dense, 3)]


def test_there_is_a_balance_only_where_the_config_asks_for_it():
    asked = {"num_experts": 8, "router_aux_loss_coef": 0.25}
    assert RouterBalance(model_of("olmoe", output_router_logits=True, **asked)).coefficient == 0.25
    assert RouterBalance(model_of("olmoe", output_router_logits=False, **asked)).coefficient == 0
    assert RouterBalance(model_of("qwen3")).coefficient == 0


def test_ranks_that_share_a_row_are_refused_only_with_a_balance():
    asked = {"num_experts": 8, "router_aux_loss_coef": 0.25}
    RouterBalance(model_of("olmoe", output_router_logits=False, **asked), cp_size=2)
    with pytest.raises(TrainerError, match="balance of its routers") as refused:
        RouterBalance(model_of("olmoe", output_router_logits=True, **asked), cp_size=2)
    assert "cp_size" in refused.value.hint


def test_only_the_pass_inside_is_recorded():
    model = model_of("olmoe", num_experts=8, output_router_logits=True, router_aux_loss_coef=1.0)
    balance, tokens = RouterBalance(model), torch.arange(5)[None]
    with balance.recording() as logits:
        model(input_ids=tokens, output_router_logits=False)
    model(input_ids=tokens, output_router_logits=False)
    assert [tuple(one.shape) for one in logits] == [(5, 8)] * 3


def test_a_sequence_weighs_what_it_adds_to_the_divisor():
    row = collate([], torch.device("cpu"))
    assert row.weights(None).tolist() == [0.0]
    assert row.weights(torch.tensor(0.0)).tolist() == [0.0]
