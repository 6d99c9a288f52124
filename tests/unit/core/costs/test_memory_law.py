"""What memory goes to, from the sizes of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from libra_cli.config.errors import LibraError
from libra_cli.config.rollout import Quantization
from libra_cli.config.training import LoraSpec
from libra_cli.core.costs.architecture import (
    PUBLISHED,
    Architecture,
    DenseTransformer,
    architecture_of,
    published,
)
from libra_cli.core.costs.draft_heads import HeadSize, head_of_files, mtp_layers
from libra_cli.core.costs.memory import rank_memory, served_bytes, server_contexts
from libra_cli.core.costs.mixture_transformer import Checkpointing
from libra_cli.core.launch.sharding import RankConditions
from tests import world as sample_world

CONFIG = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MODEL = PUBLISHED["Qwen3-1.7B"]


def test_a_config_json_gives_the_sizes_that_are_published():
    assert architecture_of(CONFIG, "m") == MODEL
    assert architecture_of({"text_config": CONFIG, **CONFIG}, "m") == MODEL
    assert MODEL.parameters == pytest.approx(1.72e9, rel=0.01)
    assert PUBLISHED["Qwen3-32B"].parameters == pytest.approx(32.76e9, rel=0.01)


def test_an_adapter_has_a_row_and_a_column_for_each_of_its_rank():
    small, large = (MODEL.with_adapter(LoraSpec(rank=rank)).trained for rank in (16, 32))
    assert small == 17_432_576  # as PEFT counts for all-linear
    assert large == 2 * small


def test_a_config_json_that_says_too_little_is_named_with_what_it_lacks():
    lacking = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    with pytest.raises(LibraError, match=r"config\.json of m has no usable 'vocab_size'"):
        architecture_of(lacking, "m")
    with pytest.raises(LibraError, match="has no usable 'num_experts_per_tok'"):
        architecture_of({**CONFIG, "num_experts": 128}, "m")


def test_a_cap_of_scores_in_a_config_json_is_matrices_of_all_heads():
    capped = architecture_of({**CONFIG, "attn_logit_softcapping": 50.0}, "m")
    assert capped == replace(MODEL, scored_heads=16)
    assert architecture_of({**CONFIG, "attn_logit_softcapping": None}, "m") == MODEL
    assert (MODEL.splits_rows, capped.splits_rows) == (True, False)


@pytest.mark.parametrize(
    ("choice", "width", "bytes_of_one"),
    [
        ("full", 2, 14),
        ("selective", 2, 27 * 2 + 14),
        ("none", 2, 27 * 8 + 14),
        ("none", 4, 27 * 8 + 16),
    ],
)
def test_matrices_of_scores_are_in_the_layers_that_keep_them(
    choice: Checkpointing, width: int, bytes_of_one: int
):
    tokens = 16_384

    def layer(shape: DenseTransformer) -> float:
        use = rank_memory(shape, world=8, tokens=tokens, choice=choice, width=width)
        assert use.moment == "layer"
        return use.parts["activations"]

    more = layer(replace(MODEL, scored_heads=16)) - layer(MODEL)
    assert more == pytest.approx(16 * tokens**2 * bytes_of_one)


def test_a_row_of_a_model_with_matrices_of_scores_is_one_trajectory():
    recipe = sample_world.recipe(model={"max_len": 2048}, training={"micro_batch_tokens": 16_384})
    conditions = RankConditions.of(recipe, on_gpu=True, dtype="bfloat16", ranks=8)
    capped = replace(MODEL, scored_heads=16)
    assert (conditions.row(MODEL), conditions.row(capped)) == (16_384, 2048)
    own = rank_memory(capped, world=8, tokens=2048, choice="full").total
    assert conditions.use(capped, 8).total == own
    assert conditions.degrees(capped, 8) == [1]
    room = conditions.longest(capped, 8, 1, 80.0)
    assert 2048 < room < conditions.longest(MODEL, 8, 1, 80.0)


SMALL = DenseTransformer(
    layers=2, hidden=4, query=10, key=100, inner=1000, vocabulary=10_000, tied=False
)
"""Of 4 x (20 + 200 + 3000) parameters a layer, and 40,000 in each of the outer two matrices."""


@pytest.mark.parametrize(
    ("world", "choice", "kept", "copies"),
    [
        # 2 norms of 4 + 2 + 2 bytes, their like of query and key, what attention and the
        # feed-forward part multiply
        (8, "none", 2 * 8 * 4 + 6 * 110 + 2 * (30 + 200) + 8 * 1000, 0),
        (8, "selective", 2 * ((10 + 200 + 8 + 2000) + 10 + 4), 0),
        (8, "full", 2 * 4, 0),
        # alone it computes under autocast: more of each token, and a copy of the layers
        (1, "none", 2 * 8 * 4 + 6 * 110 + 2 * (30 + 200) + 8 * 1000 + 12 * 4, 2 * 25_760),
        (1, "selective", 2 * ((10 + 200 + 8 + 2000) + 10 + 4) + 2 * 4, 2 * 25_760),
        (1, "full", 2 * 4 + 2 * 4, 0),
    ],
)
@pytest.mark.parametrize(("tokens", "logits"), [(10, 100_000), (4000, 2**25)])
def test_at_the_head_a_rank_holds_activations_weights_and_a_block_of_logits(
    world: int, choice: Checkpointing, kept: int, copies: int, tokens: int, logits: int
):
    use = rank_memory(SMALL, world=world, tokens=tokens, choice=choice)
    assert SMALL.parameters == 2 * 12_880 + 80_000
    own, states = (4, 20) if world == 1 else (2, 12)
    expected = {
        "activations": tokens * 2 * kept + copies,
        "gathered weights": 0 if world == 1 else 2 * 80_000,
        "head": own * 40_000 + 10 * logits + states * 4 * tokens,
    }
    assert use.moment == "head"
    assert {name: use.parts[name] for name in expected} == expected


@pytest.mark.parametrize("world", [1, 8])
def test_what_is_computed_again_is_not_held(world: int):
    held = [
        rank_memory(MODEL, world=world, tokens=16384, choice=choice).total
        for choice in ("none", "selective", "full")
    ]
    assert held == sorted(held, reverse=True)
    assert held[0] > 1.5 * held[2]


def test_more_ranks_hold_less_and_more_tokens_more():
    by_world = [
        rank_memory(MODEL, world=world, tokens=8192, choice="full").total for world in (2, 4, 8)
    ]
    assert by_world == sorted(by_world, reverse=True)
    by_tokens = [
        rank_memory(MODEL, world=8, tokens=tokens, choice="full").total
        for tokens in (1024, 8192, 65536)
    ]
    assert by_tokens == sorted(by_tokens)


@pytest.mark.parametrize("choice", ["none", "selective", "full"])
def test_inputs_of_layers_are_elsewhere_where_any_is_computed_again(choice: Checkpointing):
    kept, gone = (
        rank_memory(MODEL, world=8, tokens=65536, choice=choice, activation_offload=offload).parts[
            "activations"
        ]
        for offload in (False, True)
    )
    inputs = 65536 * 2 * 2048 * (28 - 2)
    assert kept - gone == (0 if choice == "none" else inputs)


def test_inner_units_are_there_for_a_tile():
    few, many = (
        rank_memory(MODEL, world=8, tokens=tokens, choice="full", tiled_mlp=True).total
        for tokens in (65536, 131072)
    )
    wider = replace(MODEL, inner=2 * MODEL.inner)
    few_wider, many_wider = (
        rank_memory(wider, world=8, tokens=tokens, choice="full", tiled_mlp=True).total
        for tokens in (65536, 131072)
    )
    assert many - few == many_wider - few_wider
    whole = rank_memory(MODEL, world=8, tokens=65536, choice="full").total
    assert few < whole
    mixture = published("Qwen3-30B-A3B")
    assert mixture is not None
    same = [
        rank_memory(mixture, world=8, tokens=65536, choice="full", tiled_mlp=tiled).total
        for tiled in (False, True)
    ]
    assert same[0] == same[1]


def test_logits_of_all_tokens_are_not_among_what_is_held():
    few, many = (
        rank_memory(
            replace(MODEL, vocabulary=vocabulary), world=8, tokens=65536, choice="full"
        ).total
        for vocabulary in (1000, 151936)
    )
    logits = 4 * 65536 * 150936
    assert many - few < logits / 5


def test_a_server_s_cache_is_what_the_weights_leave():
    room = 40 * 2.0**30
    held = server_contexts(MODEL, tensor_parallel=1, room=room, max_len=4096)
    assert held == pytest.approx((room - 2 * MODEL.parameters) / (4096 * 114688))
    assert server_contexts(MODEL, tensor_parallel=1, room=1.0, max_len=4096) == 0


def test_quantized_weights_are_one_byte_but_for_embeddings_and_kv_is_as_it_was():
    outer = MODEL.outer_parameters
    inner = MODEL.parameters - outer
    assert served_bytes(MODEL) == 2 * MODEL.parameters
    for how in get_args(Quantization):
        assert served_bytes(MODEL, how) == inner + 2 * outer
    whole, fewer = (
        server_contexts(MODEL, tensor_parallel=1, room=4e10, max_len=4096, quantization=how)
        for how in (None, "fp8_per_channel")
    )
    assert fewer - whole == pytest.approx(inner / (4096 * MODEL.kv_bytes()))


@pytest.mark.parametrize("world", [1, 8])
def test_an_adapter_of_a_model_takes_the_model_as_it_is_computed_with_and_little_more(world: int):
    whole = PUBLISHED["Qwen3-14B"]
    small = whole.with_adapter(LoraSpec())
    assert whole.with_adapter(None) == whole
    assert small.trained < whole.trained / 200
    use = rank_memory(small, world=world, tokens=8192, choice="full")
    assert use.parts["weights"] == (2 * whole.parameters + 4 * small.trained) / world
    assert use.parts["moments"] == 8 * small.trained / world
    assert use.total < 0.4 * rank_memory(whole, world=world, tokens=8192, choice="full").total


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_reference_model_is_float32_weights_and_an_adapter_has_none(ranks: int):
    def total(shape: Architecture, *, reference: bool) -> float:
        use = rank_memory(shape, world=ranks, tokens=8192, choice="full", reference=reference)
        return use.total

    more = total(MODEL, reference=True) - total(MODEL, reference=False)
    gathered = 2 * MODEL.outer_parameters if ranks > 1 else 0
    assert more == pytest.approx(4 * MODEL.parameters / ranks + gathered)
    small = MODEL.with_adapter(LoraSpec())
    assert total(small, reference=True) == total(small, reference=False)


def test_muon_has_one_moment_of_a_matrix_and_two_of_the_rest():
    moments = {
        optimizer: rank_memory(
            MODEL, world=1, tokens=8192, choice="full", optimizer=optimizer
        ).parts["moments"]
        for optimizer in ("adamw", "muon")
    }
    assert moments["adamw"] == 8 * MODEL.parameters
    inside = MODEL.parameters - MODEL.outer_parameters
    assert moments["muon"] == 4 * inside + 8 * MODEL.outer_parameters
    small = MODEL.with_adapter(LoraSpec())
    assert small.moment_bytes("muon") == 4 * small.trained


def test_what_is_asked_of_the_trainer_is_what_its_ranks_are_said_to_hold():
    def total(**training: object) -> float:
        recipe = sample_world.recipe(training=training)
        conditions = RankConditions.of(recipe, on_gpu=True, dtype="bfloat16", ranks=1)
        return conditions.use(MODEL, 1).total

    plain = total()
    assert total(kl_coef=0.01) - plain == pytest.approx(4 * MODEL.parameters)
    assert total(loss="tba") == total(kl_coef=0.01)
    assert total(optimizer="muon", sharding="ddp") < plain


def test_an_adapter_grows_with_its_rank_and_with_its_matrices():
    def size(**spec: object) -> int:
        return MODEL.with_adapter(LoraSpec.model_validate(spec)).trained

    assert size(rank=32) == 2 * size(rank=16)
    named = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert sum(size(target_modules=name) for name in named) == size(target_modules="all-linear")


def test_a_head_takes_room_for_its_weights_and_for_the_cache_of_its_layers():
    room, length = 4e10, 4096
    alone = server_contexts(MODEL, tensor_parallel=1, room=room, max_len=length)
    head = HeadSize(parameters=1e9, kv_numbers=MODEL.kv_bytes(1) // MODEL.layers)
    held = server_contexts(MODEL, tensor_parallel=1, room=room, max_len=length, head=head)
    token = MODEL.kv_bytes() * (1 + 1 / MODEL.layers)
    expected = (alone * MODEL.kv_bytes() * length - 2e9) / (token * length)
    assert held == pytest.approx(expected)


def test_sizes_of_heads_follow_from_their_config_and_from_the_policy_s():
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    head = head_of_files(config, 5000.0)
    assert (head.parameters, head.kv_bytes()) == (5000.0, 2 * 2 * 2 * 2 * 16)
    layers = mtp_layers({"text_config": {"mtp_num_hidden_layers": 2}}, MODEL)
    one = MODEL.layer_parameters + 2 * MODEL.hidden**2
    assert layers == HeadSize(2 * one, 2 * MODEL.kv_bytes(1) // MODEL.layers)
