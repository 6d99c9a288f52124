"""The prices of Qwen3-30B-A3B on a GPU, derived from those of dense models on the same GPU.

``python -m tests.research.mixture_profile FOLDER`` writes a profile for each GPU. Of each
tensor-parallel degree the dense models' decode steps say what a layer takes beside its weights and
how fast weights are read::

    step_s - overhead_s = layer_s x layers + bytes read on a GPU / bandwidth

fitted by least squares of relative errors (0.7 % off at worst over Qwen3-8B, 14B and 32B). The
mixture's ``step_s`` and ``expert_s`` follow with its own layers and bytes; what a sequence, a KV
token, a prompt token and a pair of tokens take is that of the dense models, on average, for each
parameter that a token meets, byte of KV cache, and unit of query heads in a layer. With more GPUs
than key heads every GPU holds one of these whole.

Limit: nothing here was measured on a mixture. Small products of many experts run further below the
peak than those of a dense layer, and routers are not uniform.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from libra_cli.core.costs.architecture import PUBLISHED, DenseTransformer, published
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.mixture_server import MixtureServerCost
from libra_cli.core.costs.mixture_transformer import MixtureTransformer
from libra_cli.core.costs.profile import Profile
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.types import Tokens
from libra_cli.sim.profiles import load_profile

GPUS = ("a100", "a800", "h100")
MODEL = "Qwen3-30B-A3B"
SIZES = ("8b", "14b", "32b")
GPU_BYTES, RESERVED_BYTES = 80e9, 2e9
"""Of a GPU, and of that what a server takes beside weights and KV cache, as in the dense ones."""


def derived_profile(gpu: str) -> Profile:
    """The mixture's profile on a GPU by its short name (``a800``)."""
    dense = [load_profile(f"{gpu}-qwen3-{size}") for size in SIZES]
    shape = published(MODEL)
    assert isinstance(shape, MixtureTransformer)
    like = dense[1]
    per_parameter = like.training.token_s / like.facts.parameters
    per_pair = like.training.pair_s / _query_units(_shape(like))
    facts = replace(
        like.facts,
        parameters=float(shape.parameters),
        layers=shape.layers,
        hidden=shape.hidden,
        vocabulary=shape.vocabulary,
        kv_bytes=float(shape.kv_bytes()),
        experts=shape.experts,
        chosen=shape.chosen,
        expert_inner=shape.expert_inner,
    )
    training = replace(
        like.training,
        facts=facts,
        token_s=_rounded(per_parameter * shape.active_parameters),
        pair_s=_rounded(per_pair * _query_units(shape)),
    )
    servers: dict[int, ServerLaw] = {
        degree: _server(shape, dense, degree) for degree in like.servers
    }
    return Profile(
        name=f"{gpu}-qwen3-30b-a3b",
        gpu=like.gpu,
        model=MODEL,
        servers=servers,
        training=training,
        moves=like.moves,
        overhead_s=like.overhead_s,
        provenance={
            "facts": "sizes from the model's config.json; memory by libra_cli/core/costs/memory.py",
            "kv_tokens": like.provenance["kv_tokens"]
            + " With more GPUs than key heads each holds a whole one.",
            "moves": like.provenance["moves"],
            "overhead_s": like.provenance["overhead_s"],
            "servers": "DERIVED BY LAW, NOT MEASURED: a + e x D(batch) + b x batch + c x KV "
            "tokens (libra_cli/core/costs/mixture_server.py). a and e: time of a layer and "
            "bandwidth fitted to the decode steps of the profiles of Qwen3-8B, 14B and 32B on "
            "this GPU (0.7 % off at worst) times this model's layers and bytes; the other prices "
            "are theirs, by parameters that a token meets, bytes of KV cache, and units of query "
            "heads. The rate of reading experts so derived was 2 % off measured ones of this "
            "model on RTX PRO 6000. Uniform routers are assumed, and products of experts as "
            "near their peak as dense ones: optimistic, most of all at TP 8, where an expert's "
            "share is 96 wide.",
            "training": "DERIVED, NOT MEASURED: token_s and pair_s of the dense profiles, by the "
            "parameters that a token meets and by layers x query width; gathering is of all "
            "parameters. step_s, exposed, micro_tokens and bandwidths are the dense profiles'.",
        },
    )


def _server(
    shape: MixtureTransformer, profiles: Sequence[Profile], degree: int
) -> MixtureServerCost:
    known = [one for one in profiles if degree in one.servers]
    costs = [(_shape(one), one.servers[degree].linear(), one.overhead_s) for one in known]
    layer_s, byte_s = _layer_and_byte_s(costs, degree)
    overhead_s = known[0].overhead_s
    expert_bytes = 2 * shape.layers * shape.expert_parameters / degree
    return MixtureServerCost(
        tensor_parallel=degree,
        step_s=_rounded(
            overhead_s + layer_s * shape.layers + byte_s * shape.read_bytes(0) / degree
        ),
        expert_s=_rounded(byte_s * expert_bytes),
        experts=shape.experts,
        chosen=shape.chosen,
        sequence_s=_rounded(
            fmean(cost.sequence_s / dense.parameters for dense, cost, _ in costs)
            * shape.active_parameters
        ),
        kv_token_s=_rounded(
            fmean(cost.kv_token_s / dense.kv_bytes() for dense, cost, _ in costs)
            * shape.kv_bytes()
            * _copies(shape, degree)
        ),
        prefill_token_s=_rounded(
            fmean(cost.prefill_token_s / dense.parameters for dense, cost, _ in costs)
            * shape.active_parameters
        ),
        prefill_pair_s=_rounded(
            fmean(cost.prefill_pair_s / _query_units(dense) for dense, cost, _ in costs)
            * _query_units(shape)
        ),
        kv_tokens=_kv_tokens(shape, degree),
        chunk_tokens=costs[0][1].chunk_tokens,
        free_tokens=round(fmean(cost.free_tokens for _, cost, _ in costs)),
    )


def _layer_and_byte_s(
    costs: Sequence[tuple[DenseTransformer, ServerCost, float]], degree: int
) -> tuple[float, float]:
    """Seconds of a layer beside its weights, and of a byte that a GPU reads."""
    rows = [
        (dense.layers, 2 * (dense.parameters - dense.vocabulary * dense.hidden) / degree)
        for dense, _, _ in costs
    ]
    seconds = [cost.step_s - overhead_s for _, cost, overhead_s in costs]
    relative = np.array(rows) / np.array(seconds)[:, None]
    scale = relative.max(axis=0)
    found = np.linalg.lstsq(relative / scale, np.ones(len(seconds)), rcond=None)[0] / scale
    return float(found[0]), float(found[1])


def _kv_tokens(shape: MixtureTransformer, degree: int) -> Tokens:
    room = 0.9 * GPU_BYTES - RESERVED_BYTES - 2 * shape.parameters / degree
    return int(room * degree / (shape.kv_bytes() * _copies(shape, degree)))


def _copies(shape: MixtureTransformer, degree: int) -> float:
    """How many GPUs hold each key head."""
    heads = shape.attention.key // 128
    return max(1.0, degree / heads)


def _query_units(shape: DenseTransformer | MixtureTransformer) -> int:
    return shape.layers * shape.query


def _shape(profile: Profile) -> DenseTransformer:
    return PUBLISHED[profile.model]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


if __name__ == "__main__":
    for short in GPUS:
        made = derived_profile(short)
        Path(sys.argv[1], f"{made.name}.json").write_text(made.to_json(), encoding="utf-8")
