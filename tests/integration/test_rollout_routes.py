"""A real vLLM server tells which experts it routed tokens to, and a trainer routes them the same.

One server computes in bfloat16, the trainer in float32, so that some choices differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="needs the [cpu] extra")
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from libra_cli.core.actions import Generate  # noqa: E402
from libra_cli.core.events import TurnGenerated  # noqa: E402
from libra_cli.core.types import STARTED_WITH, ChosenExperts, TrajectoryId  # noqa: E402
from libra_cli.node.batch.samples import read_sample  # noqa: E402
from libra_cli.node.model.batching import collate  # noqa: E402
from libra_cli.node.model.routers import routers_of  # noqa: E402
from libra_cli.node.model.scoring import ScoringModel  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.runtime.rollout.connection import Sampling  # noqa: E402
from tests.vllm_server import Bench, bench_of  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
LAYERS, EXPERTS, CHOSEN = 3, 16, 4
PROMPT = tuple(range(5, 69))
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS},
    "glm4_moe": {
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        request.param,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        vocab_size=build_tokenizer().get_vocab_size(),
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **FAMILIES[request.param],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.normal_(std=0.5)
            for bias in router.buffers():
                bias.normal_(std=0.2)
    model.save_pretrained(directory)
    save_tokenizer(build_tokenizer(), directory, max_len=512)
    return directory


@pytest.fixture(scope="module")
def bench(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    host = tmp_path_factory.mktemp("host")
    with bench_of(model_dir, host, dtype="bfloat16", training={"rollout_routes": True}) as bench:
        yield bench


def played(bench: Bench, prompt: list[int], *, known: int = 0, tokens: int = 200) -> TurnGenerated:
    action = Generate(
        request=hash((len(prompt), known, tokens)),
        trajectory=TrajectoryId(0, 0, 0),
        slot=bench.server.slot,
        incarnation=1,
        prompt_ids=array("i", prompt),
        max_tokens=tokens,
        cache_key=STARTED_WITH,
        priority=0,
        routes_from=known,
    )
    sampling = Sampling(temperature=1.0, top_p=1.0, stop_token_ids=())
    turn = bench.play(lambda: bench.server.generate(action, sampling))
    assert isinstance(turn, TurnGenerated), turn
    return turn


@pytest.fixture(scope="module")
def turn(bench: Bench) -> TurnGenerated:
    return played(bench, list(PROMPT))


def rows(routes: ChosenExperts | None) -> Any:
    assert routes is not None
    assert routes.ids.typecode == "B"
    return np.frombuffer(routes.ids, np.uint8).reshape(-1, routes.layers, routes.chosen)


def differing(one: Any, other: Any) -> float:
    """The share of tokens and layers whose sets of experts differ."""
    return float((np.sort(one, axis=-1) != np.sort(other, axis=-1)).any(axis=-1).mean())


def test_all_tokens_but_the_last_have_experts_and_a_token_takes_a_byte_for_each(
    turn: TurnGenerated,
) -> None:
    assert turn.routes is not None
    assert (turn.routes.layers, turn.routes.chosen) == (LAYERS, CHOSEN)
    assert turn.routes.end == len(PROMPT) + len(turn.token_ids) - 1
    assert len(turn.routes.ids) == turn.routes.end * LAYERS * CHOSEN


def test_a_prompt_that_is_cached_has_the_experts_of_when_it_was_computed(
    bench: Bench, turn: TurnGenerated
) -> None:
    again = rows(played(bench, list(PROMPT), tokens=4).routes)
    np.testing.assert_array_equal(again[: len(PROMPT)], rows(turn.routes)[: len(PROMPT)])


def test_a_next_turn_tells_only_what_is_not_known(bench: Bench, turn: TurnGenerated) -> None:
    assert turn.routes is not None
    context = [*PROMPT, *turn.token_ids, 7, 8, 9]
    later = played(bench, context, known=turn.routes.end, tokens=5)
    assert later.routes is not None
    assert (later.routes.start, later.routes.end) == (turn.routes.end, len(context) + 4)
    whole = turn.routes.first(turn.routes.end)
    whole.extend(later.routes)
    assert whole.end == len(context) + 4


def scored(model_dir: Path, turn: TurnGenerated, *, replayed: bool) -> tuple[Any, Any, Any]:
    """Log-probabilities of what was generated, the experts met, and the routers' gradients."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa")
    met = np.zeros((len(PROMPT) + len(turn.token_ids), LAYERS, CHOSEN), dtype=np.uint8)
    scoring = ScoringModel(model, model, torch.device("cpu"))
    first = LAYERS - len(routers_of(model))
    for layer, router in enumerate(routers_of(model), first):
        router.register_forward_hook(
            lambda _, inputs, output, layer=layer: met.__setitem__(
                (slice(len(output[2])), layer), output[2].numpy()
            )
        )
    tokens, said = [*PROMPT, *turn.token_ids], len(turn.token_ids)
    routes = turn.routes
    assert routes is not None
    told = {"layers": LAYERS, "chosen": CHOSEN, "bytes": 1, "ids": routes.ids.tobytes()}
    sample = read_sample(
        {
            "group": 0,
            "member": 0,
            "token_ids": array("i", tokens).tobytes(),
            "logprobs": (array("f", bytes(4 * len(PROMPT))) + turn.logprobs).tobytes(),
            "loss_mask": bytes(len(PROMPT)) + b"\1" * said,
            "reward": 0.0,
            "fresh": 1,
            "behind": [],
            "advantages": [],
            "routes": told if replayed else None,
        },
        max_len=512,
    )
    request = collate([sample], torch.device("cpu")).request
    logprobs = scoring.logprobs(request, temperature=1.0).logprobs
    logprobs.sum().backward()
    gradients = [router.weight.grad.norm().item() for router in routers_of(model)]
    return logprobs.detach().numpy(), met[:-1], gradients


def test_a_trainer_routes_as_the_server_did_and_without_replay_it_does_not(
    model_dir: Path, turn: TurnGenerated
) -> None:
    said = np.array(turn.logprobs)
    gap, shares = {}, {}
    for replayed in (False, True):
        logprobs, met, gradients = scored(model_dir, turn, replayed=replayed)
        shares[replayed] = differing(met, rows(turn.routes))
        gap[replayed] = float(np.abs(logprobs - said).mean())
        assert min(gradients) > 0
    print(f"differing routes {shares}, mean |log-ratio| {gap}")  # noqa: T201
    assert 0 < shares[False] < 0.2
    assert shares[True] == 0
    assert gap[True] < 1.05 * gap[False]
