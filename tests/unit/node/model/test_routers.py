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
from libra_cli.node.model.routers import (  # noqa: E402
    ROUTE_SUMS,
    RolloutRoutes,
    RouterBalance,
    RouterWeights,
    Routes,
    balance_of,
    routers_of,
    weights_of,
)
from libra_cli.node.model.tokenizer import build_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import new_model  # noqa: E402

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


@pytest.mark.parametrize(
    ("family", "more", "wanted"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}, RouterWeights("softmax", True, 1.0)),
        ("qwen3_moe", {"norm_topk_prob": False}, RouterWeights("softmax", False, 1.0)),
        ("glm4_moe", {"norm_topk_prob": True}, RouterWeights("sigmoid", True, 2.5)),
        ("glm4_moe", {"norm_topk_prob": False}, RouterWeights("sigmoid", False, 2.5)),
    ],
)
def test_it_is_found_how_a_router_weighs(family, more, wanted):
    sizes = {"num_experts": 8, "num_local_experts": 8, "first_k_dense_replace": 0}
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    if family == "qwen3_moe":
        groups = {}
    router = routers_of(model_of(family, **sizes, **groups, **more))[0]
    torch.manual_seed(0)
    with torch.no_grad():
        router.weight.normal_(std=0.5)
        found = router(torch.randn(9, 32))
    assert weights_of(router, *found) == wanted
    torch.testing.assert_close(wanted.of(found[0], found[2]), found[1])
    with pytest.raises(TrainerError, match="neither by a softmax nor by a sigmoid") as refused:
        weights_of(router, found[0], found[1] + 0.1, found[2])
    assert "rollout_routes" in refused.value.hint


def test_a_pass_counts_the_choices_that_differ_once():
    model = new_model(build_tokenizer(), 0, experts=4).train()
    assert [router.top_k for router in routers_of(model)] == [2, 2, 2]
    told, tokens = RolloutRoutes(model), torch.arange(5)[None]
    told.routes = Routes(torch.zeros(5, 3, 2, dtype=torch.int64), torch.arange(5) < 4)
    told.routes.experts[..., 1] = 1
    own = []
    for router in routers_of(model):
        router.register_forward_pre_hook(lambda part, given: own.append(part.forward(*given)[2]))
    with told.counting() as counts:
        model(input_ids=tokens)
    model(input_ids=tokens)
    others = sum((one[:4].sort(-1).values != torch.arange(2)).any(-1).sum() for one in own[:3])
    assert {name: int(count) for name, count in counts.items()} == dict(
        zip(ROUTE_SUMS, (4 * 3, int(others)), strict=True)
    )
    told.routes = None
    with told.counting() as counts:
        model(input_ids=tokens)
    assert counts == {}


def test_a_token_of_a_built_mixture_meets_as_many_weights_as_of_a_dense_model():
    def numbers(model, word):
        named = model.named_parameters()
        return sum(one.numel() for name, one in named if word in name)

    dense = new_model(build_tokenizer(), 0)
    mixture = new_model(build_tokenizer(), 0, experts=8)
    assert numbers(mixture, ".experts.") * 2 / 8 == numbers(dense, ".mlp.")
    assert numbers(mixture, "self_attn") == numbers(dense, "self_attn")
