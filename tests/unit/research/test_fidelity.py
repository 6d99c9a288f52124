"""Recordings of a real engine replayed, and step times from per-layer measurements."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from libra_cli.core.costs.mixtures import MixtureRefused
from libra_cli.core.costs.server import ServerCost
from libra_cli.sim.engine import Engine, EngineRequest
from tests.research.fidelity.layer_times import (
    GAP_S,
    INTERCONNECTS,
    MODELS,
    Interconnect,
    LayerProfile,
    LayerProfileError,
    LayerTimes,
    ModelShape,
    layer_times,
    read_layers,
)
from tests.research.fidelity.server import (
    RecordedRequest,
    RunError,
    compare_server,
    correlation,
    fidelity,
    read_run,
    replay,
)

COST = ServerCost(1, 0.02, 5e-5, 1e-7, 1e-4, 4e-9, 100_000, 512)
TINY = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head=16, inner=128, vocabulary=512)
CHUNKS, CONTEXTS, BATCHES = (0, 16, 32, 64, 128), (0, 16, 64), (0, 1, 2, 4)


def attention_us(chunk: int, context: int, batch: int, kv: int) -> float:
    slow = 3.0 if chunk else 1.0
    return 5 + 0.01 * chunk * (context + chunk / 2) + slow * 0.002 * batch * kv


def dense_us(tokens: int) -> float:
    return max(80.0, 2.0 * tokens)


def attention_points() -> Iterator[tuple[int, int, int, int]]:
    for chunk, context, batch, kv in product(CHUNKS, CONTEXTS, BATCHES, (0, 16, 64)):
        if (chunk or not context) and (chunk or batch) and bool(batch) == bool(kv):
            yield chunk, context, batch, kv


def profile() -> LayerProfile:
    sizes = [1, 16, 40, 64, 128]
    dense = (sizes, [dense_us(t) * 1e-6 for t in sizes])
    return LayerProfile(
        dense={
            "qkv_proj": dense,
            "layernorm": (sizes, [1e-6] * 5),
            "embedding": (sizes, [2e-6] * 5),
        },
        per_sequence={"lm_head": ([1, 128], [50e-6, 50e-6])},
        attention={point: attention_us(*point) * 1e-6 for point in attention_points()},
    )


def write_profile(folder: Path, stem: str, *, packed: bool = False) -> None:
    tables = {
        "dense": ["layer,tokens,time_us"]
        + [f"qkv_proj,{t},{dense_us(t)}" for t in (1, 16, 64, 128, 2048)],
        "per_sequence": ["layer,sequences,time_us", "lm_head,1,700", "lm_head,128,700"],
        "attention": ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
        + [",".join(map(str, (*point, attention_us(*point)))) for point in attention_points()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in tables.items():
        text = "\n".join(lines).encode()
        path = folder / f"{stem}_{name}.csv"
        if packed:
            path.with_suffix(".csv.gz").write_bytes(gzip.compress(text))
        else:
            path.write_bytes(text)


def times(**changes: Any) -> LayerTimes:
    known: dict[str, Any] = {
        "profile": profile(),
        "shape": TINY,
        "tensor_parallel": 1,
        "kv_tokens": 10_000,
        "chunk_tokens": 32,
    }
    return LayerTimes(**{**known, **changes})


def recorded(cost: ServerCost, n: int = 40) -> list[RecordedRequest]:
    """What a server that is exactly `cost` would have recorded."""
    found = []
    engine = Engine(cost, max_num_seqs=8)
    sizes = [(50 + 37 * i % 400, 20 + 53 * i % 90) for i in range(n)]
    for i, (prompt, generate) in enumerate(sizes):
        engine.submit(EngineRequest(i, i, prompt, generate), 0.1 * i)
    for done in engine.advance(1e6):
        prompt, generate = sizes[done.id]
        found.append(
            RecordedRequest(
                prompt,
                generate,
                done.submitted_at,
                done.admitted_at,
                done.first_token_at,
                done.finished_at,
            )
        )
    return found


# --- replaying ----------------------------------------------------------------------------------


def test_a_server_that_is_its_model_is_matched_exactly() -> None:
    found = fidelity(COST, recorded(COST), 8)
    assert found.requests == 40
    assert found.mean_error == pytest.approx(0, abs=1e-9)
    assert found.p99_error == pytest.approx(0, abs=1e-9)
    assert found.makespan_error == pytest.approx(0, abs=1e-9)
    assert found.correlation == pytest.approx(1)
    assert found.within


def test_a_model_that_is_too_fast_has_negative_errors() -> None:
    found = fidelity(replace(COST, step_s=0.01), recorded(COST), 8)
    assert found.mean_error < -0.3
    assert found.makespan_error < -0.1
    assert found.token_error < -0.3
    assert not found.within


def test_the_engine_sees_arrivals_and_lengths_only() -> None:
    real = recorded(COST)
    other = [replace(r, scheduled_at=0.0, first_token_at=1.0, finished_at=2.0) for r in real]
    assert replay(COST, real, 8) == replay(COST, other, 8)


def test_a_recording_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fidelity(COST, [], 8)


def test_a_correlation_knows_constants() -> None:
    assert correlation([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == pytest.approx(1)
    assert correlation([1.0, 2.0], [2.0, 1.0]) == pytest.approx(-1)
    assert correlation([1.0, 1.0], [2.0, 2.0]) == 1.0
    assert correlation([1.0, 1.0], [2.0, 3.0]) == 0.0


# --- reading recordings -------------------------------------------------------------------------

META = {
    "model": "meta-llama/Llama-3.1-8B",
    "engine_kwargs": {
        "tensor_parallel_size": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 2048,
    },
}
LINE = {
    "input_toks": 30,
    "output_toks": 9,
    "queued_ts": 1000.5,
    "scheduled_ts": 1000.6,
    "first_token_ts": 1000.7,
    "last_token_ts": 1001.0,
}


def write_run(folder: Path, lines: list[Any], meta: Any = META, stem: str = "run") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    requests, about = folder / f"{stem}_requests.jsonl", folder / f"{stem}_meta.json"
    requests.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    about.write_text(json.dumps(meta))
    return [requests, about]


def test_a_recording_starts_at_its_first_request(tmp_path: Path) -> None:
    early = {**LINE, "queued_ts": 1000.0}
    run = read_run(*write_run(tmp_path, [LINE, "", early]))
    assert (run.model, run.max_num_seqs, run.chunk_tokens) == (META["model"], 4, 2048)
    assert [r.queued_at for r in run.requests] == [0.0, 0.5]
    assert run.requests[1].latency_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("{", "jsonl:2"),
        ("[]", "jsonl:2"),
        ({**LINE, "input_toks": 0}, "jsonl:2"),
        ({**LINE, "last_token_ts": 1.0}, "jsonl:2"),
        ({"input_toks": 3}, "output_toks"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: Any, where: str) -> None:
    with pytest.raises(RunError, match=where):
        read_run(*write_run(tmp_path, [LINE, line]))


def test_what_is_missing_of_a_recording_is_named(tmp_path: Path) -> None:
    requests, meta = write_run(tmp_path, [])
    with pytest.raises(RunError, match="no requests"):
        read_run(requests, meta)
    with pytest.raises(RunError, match=r"absent\.jsonl"):
        read_run(tmp_path / "absent.jsonl", meta)
    meta.write_text("{}")
    with pytest.raises(RunError, match=r"meta\.json"):
        read_run(requests, meta)


# --- step times from layers ---------------------------------------------------------------------


def test_a_step_is_its_layers_added_up() -> None:
    around = 2e-6 + 50e-6 + 2 * (80e-6 + 2 * 1e-6 + GAP_S)
    assert times().decode_step_s(4, 4 * 64) == pytest.approx(
        around + 2e-6 * attention_us(0, 0, 4, 64)
    )
    assert times().mixed_step_s(0, 0, 32, 16) == pytest.approx(
        around + 2e-6 * attention_us(32, 16, 0, 0)
    )
    assert times().mixed_step_s(4, 4 * 64, 32, 16) == pytest.approx(
        around + 2e-6 * attention_us(32, 16, 4, 64)
    )


def test_between_and_beyond_measurements_the_times_are_straight_lines() -> None:
    assert times().decode_step_s(3, 3 * 40) == pytest.approx(
        times().decode_step_s(4, 3 * 40 * 4 / 3) / 2 + times().decode_step_s(2, 3 * 40 * 2 / 3) / 2
    )
    one, two, three = (times().decode_step_s(4, 4 * kv) for kv in (64, 112, 160))
    assert three - two == pytest.approx(two - one)
    assert two > one


def test_a_prompt_beside_them_slows_the_decoding_ones() -> None:
    alone = times().mixed_step_s(0, 0, 32, 0)
    beside = times().mixed_step_s(4, 256, 32, 0) - alone
    decode = times().decode_step_s(4, 256) - times().decode_step_s(4, 64)
    assert beside > 2 * decode


def test_several_short_prompts_attend_to_less_than_a_long_one() -> None:
    # Two prompts of 16 tokens: 2 x 16 x 8 pairs, as if the context began before 0.
    both = times().mixed_step_s(0, 0, 32, 8 - 16)
    assert both < times().mixed_step_s(0, 0, 32, 0)
    assert times().mixed_step_s(2, 64, 32, 8 - 16) > both


def test_the_line_of_decode_steps_meets_the_table() -> None:
    first, growth, holds = times().decode_line(4, 256)
    assert first == times().decode_step_s(4, 256)
    assert first + holds * growth == pytest.approx(times().decode_step_s(4, 256 + holds * 4))


def test_overhead_and_two_all_reduces_a_layer_are_added() -> None:
    plain = times().decode_step_s(4, 64)
    assert times(overhead_s=0.01).decode_step_s(4, 64) == pytest.approx(plain + 0.01)
    link = Interconnect(1e-5, 1e9)
    sums = 2 * TINY.layers * (1e-5 + 4 * TINY.hidden * 2 / 1e9)  # over 2 GPUs each sends it once
    two = times(tensor_parallel=2, interconnect=link).decode_step_s(4, 64)
    assert two == pytest.approx(plain + sums)


def test_an_all_reduce_costs_a_latency_and_what_a_ring_sends() -> None:
    link = Interconnect(1e-5, 1e9)
    assert link.all_reduce_s(1e6, 1) == 0
    assert link.all_reduce_s(1e6, 2) == pytest.approx(1e-5 + 1e-3)
    assert link.all_reduce_s(1e6, 4) == pytest.approx(1e-5 + 1.5e-3)


def test_without_nvlink_an_all_reduce_takes_longer_of_any_size() -> None:
    host, peer, nvlink = (INTERCONNECTS[name] for name in ("pcie", "pcie-peer", "nvlink"))
    for size in (1e4, 1e6, 2e7):
        assert (
            host.all_reduce_s(size, 2) > peer.all_reduce_s(size, 2) > nvlink.all_reduce_s(size, 2)
        )
    # What the sources of the constants have measured.
    assert peer.all_reduce_s(20_971_520, 2) == pytest.approx(587e-6, rel=0.03)
    assert nvlink.all_reduce_s(2_097_152, 2) == pytest.approx(25e-6, rel=0.15)


def test_a_mixture_of_experts_is_refused_by_name_and_by_its_layers(tmp_path: Path) -> None:
    with pytest.raises(MixtureRefused, match="mixture of experts") as refused:
        layer_times(tmp_path, "RTXPRO6000", "Qwen/Qwen3-30B-A3B-Instruct-2507", 1)
    assert "a800-qwen3-30b-a3b" in refused.value.hint
    stem = "RTXPRO6000_Qwen3-8B_tp1"
    write_profile(tmp_path, stem)  # it has qkv_proj only
    with pytest.raises(LayerProfileError, match=r"Qwen3-8B_tp1_dense: has no o_proj"):
        layer_times(tmp_path, "RTXPRO6000", "Qwen/Qwen3-8B", 1)


def test_a_recorded_run_of_a_mixture_is_refused_whatever_the_prices(tmp_path: Path) -> None:
    requests = tmp_path / "GPU_requests.jsonl"
    line = {"input_toks": 9, "output_toks": 9, "queued_ts": 0, "scheduled_ts": 0}
    requests.write_text(json.dumps({**line, "first_token_ts": 1, "last_token_ts": 2}))
    engine = {"tensor_parallel_size": 1, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    meta = {"model": "Qwen/Qwen3-30B-A3B", "engine_kwargs": engine}
    (tmp_path / "GPU_meta.json").write_text(json.dumps(meta))
    for layers in (None, tmp_path):
        with pytest.raises(MixtureRefused, match="Qwen3-30B-A3B"):
            compare_server(requests, None, profile="a800-qwen3-14b", layers=layers, gpu="")


def test_an_unknown_interconnect_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(LayerProfileError, match="token-ring") as unknown:
        layer_times(tmp_path, "RTXPRO6000", "Qwen/Qwen3-32B", 2, interconnect="token-ring")
    assert "nvlink" in unknown.value.hint


def test_the_kv_cache_is_what_the_weights_leave() -> None:
    shape = MODELS["Qwen3-32B"]
    assert shape.parameters == pytest.approx(32.8e9, rel=0.01)
    assert MODELS["Llama-3.1-8B"].parameters == pytest.approx(8.03e9, rel=0.01)
    assert shape.kv_token_bytes == 262_144
    assert shape.kv_capacity(80, 2) > 2 * shape.kv_capacity(80, 1)
    with pytest.raises(LayerProfileError, match="61 GiB of weights do not fit 1 GPUs"):
        shape.kv_capacity(40, 1)


def test_profiles_read_the_same_packed_and_plain(tmp_path: Path) -> None:
    write_profile(tmp_path / "plain", "gpu_model_tp1")
    write_profile(tmp_path / "packed", "gpu_model_tp1", packed=True)
    plain = read_layers(tmp_path / "plain", "gpu_model_tp1")
    assert plain == read_layers(tmp_path / "packed", "gpu_model_tp1")
    assert plain.attention[(16, 64, 4, 16)] == pytest.approx(attention_us(16, 64, 4, 16) * 1e-6)


@pytest.mark.parametrize(
    ("table", "text", "word"),
    [
        ("dense", "layer,tokens\na,1\n", "time_us"),
        ("dense", "layer,tokens,time_us\na,1,fast\n", "fast"),
        ("per_sequence", "layer,sequences,time_us\n", "no rows"),
        ("attention", None, "cannot be read"),
    ],
)
def test_a_table_that_is_none_is_named(
    tmp_path: Path, table: str, text: str | None, word: str
) -> None:
    write_profile(tmp_path, "m")
    path = tmp_path / f"m_{table}.csv"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(LayerProfileError, match=rf"m_{table}\.csv.*{word}"):
        read_layers(tmp_path, "m")


def test_an_attention_table_with_holes_is_refused() -> None:
    holes = profile()
    attention = {p: s for p, s in holes.attention.items() if p != (16, 16, 2, 16)}
    with pytest.raises(LayerProfileError, match="full grid"):
        times(profile=replace(holes, attention=attention))


def test_an_unknown_model_or_gpu_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(LayerProfileError, match="Llama-9") as unknown:
        layer_times(tmp_path, "RTXPRO6000", "meta-llama/Llama-9", 1)
    assert "Qwen3-32B" in unknown.value.hint
    with pytest.raises(LayerProfileError, match="B300"):
        layer_times(tmp_path, "B300", "Qwen/Qwen3-32B", 1)
