"""Real servers of two ranks that hold linear layers in 8 bits: what they compute, and prove."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="needs the [cpu] extra")

import torch
from safetensors.torch import load_file, save_file

from libra_cli.config.errors import ServerError
from libra_cli.config.rollout import Quantization
from libra_cli.core.actions import SyncServer
from libra_cli.node.rollout.number_formats import multiplies_int8
from libra_cli.node.weights import files
from libra_cli.node.weights.adapter import A, B
from libra_cli.node.weights.checksum import described
from libra_cli.node.weights.chunks import MANIFEST
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import ProbeResult, publish
from libra_cli.node.weights.weight_server import WeightServer
from libra_cli.runtime.rollout.decode_check import EXPECTED, decode_gap
from libra_cli.runtime.weights.probe_bounds import WRONG_GAP, probe_gap
from tests.credentials import credentials_of, url_of
from tests.gpu.model import REHEARSED, build
from tests.vllm_server import bench_of, published

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
STALE = "model.layers.2.self_attn.o_proj.weight"
"""Each rank has a part of its columns, and the scales of its rows are of both parts."""
IDS = [(17 + 7 * place) % REHEARSED.shape.vocabulary for place in range(64)]
SEED = 1
INT8 = "int8_per_channel"
MOVED = 1 / 16
"""Share of the numbers that differ between the first two versions: few, as after a step."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> Iterator[tuple[Path, dict[int, Path]]]:
    """A model's directory, and its versions as another host has them: 1 is the model, 2 has some
    numbers moved and came as a delta, 3 is 1 with an adapter."""
    base = tmp_path_factory.mktemp("published")
    build(REHEARSED, base / "model", "cpu")
    made = publish_versions(base)
    there, here = (WeightServer(base / name, credentials_of()) for name in ("versions", "pulled"))
    try:
        source = url_of(there.serve("127.0.0.1", 0))
        pulled = {number: here.pull(one, [source], patience_s=60) for number, one in made.items()}
        came = [(one.kind, one.detail) for one in pulled.values()]
        assert came == [("full", ""), ("delta", ""), ("full", "")]
        yield base / "model", {number: Path(one.path) for number, one in pulled.items()}
    finally:
        here.close()
        there.close()


def publish_versions(base: Path) -> dict[int, str]:
    """Write the three versions of the model in ``base``; return their names."""
    first = load_file(base / "model" / "model.safetensors")
    torch.manual_seed(SEED)
    second = {
        name: torch.where(
            torch.rand(one.shape) < MOVED, one * (1 + 0.2 * torch.randn(one.shape)), one
        ).to(one.dtype)
        for name, one in first.items()
    }
    module, rank = STALE.removesuffix(".weight"), 4
    rows, columns = first[STALE].shape
    adapter = {
        module + A: torch.randn(rank, columns) / 16,
        module + B: torch.randn(rows, rank) / 16,
    }
    about = {"scaling": 1.0, "base": {name: described(one) for name, one in first.items()}}
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "DELTA_S", 60.0)  # however busy the machine is
        for version, tensors in ((1, first), (2, second), (3, adapter)):
            done = publish(
                whole((name, one.bfloat16()) for name, one in tensors.items()),
                base / "versions",
                version=version,
                trainer_incarnation=1,
                probe=ProbeResult(IDS, [0.0]),
                keep=3,
                adapter=about if version == 3 else None,
            )
            made[version] = done.name
    return made


@pytest.fixture(scope="module", params=get_args(Quantization))
def bench(versions, tmp_path_factory, request):
    if request.param == INT8 and not multiplies_int8():
        pytest.skip("products of int8 overflow on this CPU: it is refused, by the last test")
    host = tmp_path_factory.mktemp("host")
    rollout = {"quantization": request.param}
    with bench_of(versions[0], host, dtype="bfloat16", ranks=2, rollout=rollout) as bench:
        yield bench


def load(bench, directory: Path, version: int) -> None:
    bench.play(lambda: bench.server.load(str(directory), published(version), timeout_s=60))


@contextmanager
def changed(version: Path, directory: Path) -> Iterator[dict[str, Any]]:
    """A copy of a version, whose tensors are written again as they are left."""
    shutil.copytree(version, directory)
    path = directory / json.loads((version / MANIFEST).read_text())["tensors"][STALE]["file"]
    tensors = load_file(path)
    yield tensors
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def tensors_of(directory: Path) -> dict[str, Any]:
    return {n: t for path in directory.glob("*.safetensors") for n, t in load_file(path).items()}


def logprobs_of(model_dir: Path, directory: Path) -> tuple[float, ...]:
    """What transformers gives the tokens of the probe by the weights as they were published."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    model.load_state_dict(tensors_of(directory), strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, -1)[range(len(IDS) - 1), IDS[1:]]
    return tuple(chosen.tolist())


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_is_proved_and_differs_from_the_published_one_by_a_little(
    versions, bench, record_property, version
):
    """More than two computations in bfloat16 do (0.01), and far less than wrong weights."""
    load(bench, versions[1][version], version)
    measured = bench.play(lambda: bench.server.probe(IDS, published(version)))
    gap = probe_gap(logprobs_of(versions[0], versions[1][version]), measured)
    record_property(f"gap of version {version}", gap)
    assert 0 < gap < WRONG_GAP / 4
    sync = SyncServer("local/0", 0, published(version))
    decoded = bench.play(lambda: decode_gap(bench.server, sync, IDS))
    record_property(f"decoded and scored, version {version}", decoded)
    assert decoded < EXPECTED["bfloat16", False].later


def test_an_adapter_is_merged_before_it_is_quantized(versions, bench):
    load(bench, versions[1][3], 3)


def test_a_layer_that_stays_of_the_version_before_is_noticed(versions, bench, tmp_path):
    """vLLM keeps what it holds of a tensor that does not come, and only says so in its log."""
    load(bench, versions[1][1], 1)
    with changed(versions[1][2], tmp_path / "v") as tensors:
        del tensors[STALE]
    with pytest.raises(ServerError, match=rf"{STALE} is not in the version \(and 1 more\)"):
        load(bench, tmp_path / "v", 2)
    load(bench, versions[1][2], 2)


def test_one_bit_of_a_layer_is_noticed_though_rounding_hides_it(versions, bench, tmp_path):
    with changed(versions[1][2], tmp_path / "v") as tensors:
        tensors[STALE].view(torch.int16).view(-1)[-1] ^= 1
    with pytest.raises(ServerError, match=f"{STALE} is not the trainer's"):
        load(bench, tmp_path / "v", 2)
    load(bench, versions[1][2], 2)


@pytest.mark.skipif(multiplies_int8(), reason="this CPU adds up products of int8 in 32 bits")
def test_int8_is_refused_in_words_where_its_products_overflow(versions, tmp_path):
    rollout = {"quantization": INT8}
    with (
        bench_of(versions[0], tmp_path, dtype="bfloat16", ranks=1, rollout=rollout) as bench,
        pytest.raises(ServerError, match="has no VNNI instructions"),
    ):
        load(bench, versions[1][1], 1)
