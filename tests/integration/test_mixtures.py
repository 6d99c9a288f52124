"""Mixtures of experts: gradients of any cut of a batch against transformers' own, one by one.

The ranks of each world are started once and take one case after the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

np = pytest.importorskip("numpy", reason="needs the [cpu] extra")
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from accelerate.state import AcceleratorState  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from libra_cli.node.batch.samples import TokenSample, read_samples  # noqa: E402
from libra_cli.node.model.routers import RouterBalance, routers_of  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.integration.test_context_parallel import whole  # noqa: E402
from tests.ranks import in_ranks, trainer_config  # noqa: E402
from tests.trainers import batch  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
CLOSE = 1e-5
COEFFICIENT = 0.5
LAYERS = 3
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "olmoe": {},
}
GROUPS: dict[str, Any] = {
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
"""Experts in groups, weighed by sigmoids; those of the largest are chosen after a correction."""
ROUTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "deepseek_v3": GROUPS
    | {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "glm4_moe": GROUPS,
}
"""Families whose routers are told what to choose; of whole rows and of ranks' parts of them."""


class Case(NamedTuple):
    sharding: str = "ddp"
    again: str = "none"
    micro_batch_tokens: int = 10_000
    ep_size: int = 1
    dp_shard_size: int | None = None
    cp_size: int = 1


CASES = [
    Case(),
    Case(micro_batch_tokens=1),
    Case("fsdp2", "full", 150),
    Case("fsdp2", "selective", 60),
    Case("ddp", "full", 150),
]


def config_of(family: str, **more: Any) -> Any:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": build_tokenizer().get_vocab_size(),
        "max_position_embeddings": 128,
        "output_router_logits": True,
        "router_aux_loss_coef": COEFFICIENT,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return AutoConfig.for_model(family, **sizes | (FAMILIES | ROUTED)[family] | more)


@pytest.fixture(scope="module", params=list(FAMILIES))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp(request.param), config_of(request.param))


@pytest.fixture(scope="module", params=list(ROUTED))
def routed_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of(request.param, output_router_logits=False)
    return saved(tmp_path_factory.mktemp(request.param), config)


def saved(directory: Path, config: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.normal_(std=0.5)  # so that experts are chosen by more than rounding
            for bias in router.buffers():
                bias.normal_(std=0.2)
    model.save_pretrained(directory)
    save_tokenizer(build_tokenizer(), directory, max_len=128)
    return directory


def gradients_in(
    host: Path, model_dir: Path, cases: Sequence[Case], given: Sequence[TokenSample]
) -> list[Any]:
    return [gradients_of(host, model_dir, case, given) for case in cases]


def gradients_of(
    host: Path, model_dir: Path, case: Case, given: Sequence[TokenSample]
) -> tuple[float, dict[str, Any]]:
    """The loss summed over generated tokens, and its gradients, gathered."""
    sums, gradients = sums_of(host, model_dir, case, given)
    return sums["loss"], gradients


def sums_in(
    host: Path, model_dir: Path, cases: Sequence[Case], given: Sequence[TokenSample]
) -> list[Any]:
    return [sums_of(host, model_dir, case, given) for case in cases]


def sums_of(
    host: Path, model_dir: Path, case: Case, given: Sequence[TokenSample]
) -> tuple[dict[str, float], dict[str, Any]]:
    """All sums over the samples, and the gradients, gathered."""
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    training = {
        "loss": "sft",
        "sharding": case.sharding,
        "activation_checkpointing": case.again,
        "micro_batch_tokens": case.micro_batch_tokens,
    }
    world = int(os.environ["WORLD_SIZE"])
    config = trainer_config(host, model_dir, world, training, temperature=1.0, **meshes_of(case))
    trainer = Trainer(config)
    assert trainer.model.config._experts_implementation == "grouped_mm"
    assert trainer._scoring.packs
    sums = trainer.gradients_of(given)
    assert sums is not None
    return sums, whole(trainer)


def meshes_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in ("ep_size", "dp_shard_size", "cp_size")}


def samples() -> list[TokenSample]:
    return list(read_samples(batch(1), 128))


def of_transformers(model_dir: Path) -> tuple[float, dict[str, Any]]:
    """The same of transformers' own loss, a sequence at a time, experts one after the other."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, experts_implementation="eager")
    model.train()
    total = 0.0
    for sample in samples():
        tokens = torch.tensor(sample.token_ids)[None].long()
        mask = torch.tensor(sample.loss_mask)[None].bool()
        labels = tokens.masked_fill(~mask, -100)
        loss = model(input_ids=tokens, labels=labels).loss * mask.sum()
        loss.backward()
        total += float(loss)
    return total, {name: one.grad.numpy() for name, one in model.named_parameters()}


def chosen_by(model: Any, tokens: Any) -> Any:
    """``[tokens, layers, k]``: the experts that its routers choose; 0 in layers without."""
    routes = np.zeros((tokens.shape[1], LAYERS, 2), dtype=np.uint8)
    first = LAYERS - len(routers_of(model))
    hooks = [
        router.register_forward_hook(
            lambda _, inputs, output, layer=layer: routes.__setitem__(
                (slice(None), layer), output[2].numpy()
            )
        )
        for layer, router in enumerate(routers_of(model), first)
    ]
    with torch.no_grad():
        model(input_ids=tokens, output_router_logits=False)
    for hook in hooks:
        hook.remove()
    return routes


def with_routes(routes_of: Any) -> list[TokenSample]:
    return [replace(sample, routes=routes_of(sample)) for sample in samples()]


def of_others(sample: TokenSample) -> Any:
    """Two random experts of each token in each layer; of its last tokens nothing is known."""
    random = np.random.default_rng([3, sample.group, sample.member])
    order = random.random((len(sample.token_ids) - 1, LAYERS, 8)).argsort(axis=-1)
    return order[..., :2].astype(np.uint8)


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest norm of a difference over the norm of what is wanted, of all tensors."""
    assert found.keys() == wanted.keys()
    return max(
        float(np.linalg.norm(found[name] - one) / np.linalg.norm(one))
        for name, one in wanted.items()
    )


def adapted_in(host: Path, model_dir: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The adapter on attention and experts after two steps, gathered, of each case."""
    return [adapted_of(host, model_dir, case) for case in cases]


def adapted_of(host: Path, model_dir: Path, case: Case) -> dict[str, Any]:
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    training = {
        "sharding": case.sharding,
        "activation_checkpointing": case.again,
        "micro_batch_tokens": case.micro_batch_tokens,
        "lora": {"rank": 8, "alpha": 16, "experts": True},
        "kl_coef": 0.1,
        "warmup_steps": 0,
    }
    world = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(trainer_config(host, model_dir, world, training, **meshes_of(case)))
    for step in (1, 2):
        trainer.train(step, samples())
    return {name: one.float().numpy().copy() for name, one in trainer.whole_weights()}


def test_worlds_come_to_the_same_adapter_on_experts(model_dir: Path, tmp_path: Path) -> None:
    ((wanted,),) = in_ranks([tmp_path], adapted_in, [(tmp_path, model_dir, CASES[:1])])
    assert sum(".experts." in name for name in wanted) >= 2 * 2 * 8 * 3
    arguments = [(tmp_path, model_dir, CASES[2:])] * 2
    for rank in in_ranks([tmp_path] * 2, adapted_in, arguments):
        for case, found in zip(CASES[2:], rank, strict=True):
            assert apart(found, wanted) < 1e-4, case


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_cut_of_a_batch_has_the_gradients_of_transformers(
    ranks: int, model_dir: Path, tmp_path: Path
) -> None:
    loss, wanted = of_transformers(model_dir)
    arguments = [(tmp_path, model_dir, CASES, samples())] * ranks
    for rank in in_ranks([tmp_path] * ranks, gradients_in, arguments):
        for case, (found_loss, found) in zip(CASES, rank, strict=True):
            assert found_loss == pytest.approx(loss, rel=CLOSE), case
            assert apart(found, wanted) < CLOSE, case


def test_replayed_choices_of_its_own_change_nothing(model_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)

    def own(sample: TokenSample) -> Any:
        return chosen_by(model, torch.tensor(sample.token_ids)[None].long())

    loss, wanted = of_transformers(model_dir)
    arguments = [(tmp_path, model_dir, CASES[:1], with_routes(own))]
    ((found_loss, found),) = in_ranks([tmp_path], gradients_in, arguments)[0]
    assert found_loss == pytest.approx(loss, rel=CLOSE)
    assert apart(found, wanted) < CLOSE


def test_replayed_choices_of_others_are_those_of_any_cut(model_dir: Path, tmp_path: Path) -> None:
    given = with_routes(of_others)
    ((loss, wanted),) = in_ranks(
        [tmp_path], gradients_in, [(tmp_path, model_dir, CASES[:1], given)]
    )[0]
    own_loss, _ = of_transformers(model_dir)
    assert abs(loss - own_loss) > 1e-4 * own_loss
    routers = [name for name in wanted if "gate.weight" in name]
    assert all(np.linalg.norm(wanted[name]) > 0 for name in routers)
    arguments = [(tmp_path, model_dir, CASES, given)] * 2
    for rank in in_ranks([tmp_path] * 2, gradients_in, arguments):
        for case, (found_loss, found) in zip(CASES, rank, strict=True):
            assert found_loss == pytest.approx(loss, rel=CLOSE), case
            assert apart(found, wanted) < CLOSE, case


SHARED = {
    2: [Case("fsdp2", "full", 150, cp_size=2), Case("ddp", "none", 60, cp_size=2)],
    4: [Case("fsdp2", "full", 150, cp_size=2, ep_size=2), Case("fsdp2", cp_size=4, ep_size=2)],
}
"""Ranks that share rows; and where there are enough of them, that hold other experts."""


def test_routers_of_every_kind_follow_their_own_choices(routed_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(routed_dir)
    loss, wanted = of_transformers(routed_dir)
    given = with_routes(lambda one: chosen_by(model, torch.tensor(one.token_ids)[None].long()))
    cases = [Case("ddp", "full", 150)]
    for rank in in_ranks([tmp_path], sums_in, [(tmp_path, routed_dir, cases, given)]):
        ((sums, found),) = rank
        assert sums["loss"] == pytest.approx(loss, rel=CLOSE)
        assert apart(found, wanted) < CLOSE
        tokens = sum(len(sample.token_ids) for sample in given)
        assert sums["routes_told"] == tokens * len(routers_of(model))  # and not once more
        assert sums["routes_differ"] == 0
    arguments = [(tmp_path, routed_dir, [given, with_routes(of_others)])]
    ((own, others),) = in_ranks([tmp_path], told_by_steps, arguments)
    assert own == 0
    assert 0.5 < others < 1


def told_by_steps(
    host: Path, model_dir: Path, batches: Sequence[Sequence[TokenSample]]
) -> list[float]:
    """What a first step on each of the batches says of its routes."""
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    trainer = Trainer(trainer_config(host, model_dir, 1, {"warmup_steps": 9}))
    return [trainer.train(step, given)["routes_differ"] for step, given in enumerate(batches, 1)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_that_share_rows_have_the_routes_of_their_part(
    ranks: int, routed_dir: Path, tmp_path: Path
) -> None:
    given = with_routes(of_others)
    alone = in_ranks([tmp_path], sums_in, [(tmp_path, routed_dir, [Case()], given)])
    ((wanted_sums, wanted),) = alone[0]
    assert 0.5 < wanted_sums["routes_differ"] / wanted_sums["routes_told"] < 1
    arguments = [(tmp_path, routed_dir, SHARED[ranks], given)] * ranks
    for rank in in_ranks([tmp_path] * ranks, sums_in, arguments):
        for case, (sums, found) in zip(SHARED[ranks], rank, strict=True):
            assert apart(found, wanted) < CLOSE, case
            assert sums == pytest.approx(wanted_sums, rel=CLOSE), case


def test_the_balance_is_part_of_what_is_compared(model_dir: Path) -> None:
    loss, wanted = of_transformers(model_dir)
    described = AutoConfig.from_pretrained(model_dir)
    without = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=described.__class__(**described.to_dict() | {"output_router_logits": False}),
    )
    assert RouterBalance(without).coefficient == 0
    tokens = torch.tensor(samples()[0].token_ids)[None].long()
    with_it = AutoModelForCausalLM.from_pretrained(model_dir)
    assert RouterBalance(with_it).coefficient == COEFFICIENT
    more = (
        with_it(input_ids=tokens, labels=tokens).loss
        - without(input_ids=tokens, labels=tokens).loss
    )
    assert more > COEFFICIENT  # an even router has 1 x its chosen experts
    router = next(name for name in wanted if "gate.weight" in name)
    assert np.linalg.norm(wanted[router]) > 0
    assert loss > 0
