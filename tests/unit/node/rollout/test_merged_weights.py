"""A model merged of base files and an adapter: exact, and refused where anything is off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from safetensors.torch import save_file  # noqa: E402

from libra_cli.node.rollout.merged_weights import MergedWeights  # noqa: E402
from libra_cli.node.rollout.worker import VersionLoader  # noqa: E402
from libra_cli.node.weights.adapter import A, B, adapted, factors_of, is_adapter  # noqa: E402
from libra_cli.node.weights.checksum import described  # noqa: E402
from libra_cli.node.weights.chunks import MANIFEST  # noqa: E402
from libra_cli.node.weights.tensor_rows import whole  # noqa: E402
from libra_cli.node.weights.versions import ProbeResult, publish  # noqa: E402

SCALING = 2.0


def tensors(dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    base = {"m.q.weight": made(6, 4), "m.norm.weight": made(4)}
    return base, {"m.q" + A: made(2, 4), "m.q" + B: made(6, 2)}


def written(directory: Path, dtype: Any) -> tuple[Path, Path, dict[str, Any]]:
    base, adapter = tensors(dtype)
    model = directory / "model"
    model.mkdir()
    save_file(base, model / "model.safetensors")
    about = {"scaling": SCALING, "base": {name: described(one) for name, one in base.items()}}
    done = publish(
        whole(adapter.items()),
        directory / "versions",
        version=1,
        trainer_incarnation=0,
        probe=ProbeResult([1, 2], [-1.0]),
        keep=1,
        adapter=about,
    )
    version = directory / "versions" / done.name
    return model, version, json.loads((version / MANIFEST).read_bytes())


def merged(model: Path, version: Path, manifest: dict[str, Any]) -> MergedWeights:
    return MergedWeights(model, version, manifest, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_is_the_base_s_and_the_scaled_product_rounded_once(tmp_path: Path, dtype: Any):
    weights = merged(*written(tmp_path, dtype))
    found = dict(weights)
    base, adapter = tensors(dtype)
    a, b = adapter["m.q" + A].double(), adapter["m.q" + B].double()
    wanted = base["m.q.weight"].double() + SCALING * b @ a
    off = (found["m.q.weight"].double() - wanted).abs().max()
    assert float(off / wanted.abs().max()) < torch.finfo(dtype).eps
    assert torch.equal(found["m.norm.weight"], base["m.norm.weight"])
    assert weights.wrong == []
    assert weights.expected == {name: described(one) for name, one in found.items()}


def test_two_versions_of_the_same_numbers_are_equal_whatever_was_loaded_before(tmp_path: Path):
    given = written(tmp_path, torch.bfloat16)
    first, second = (dict(merged(*given)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_base_model_or_adapter_is_named(tmp_path: Path):
    model, version, manifest = written(tmp_path, torch.float32)
    base, adapter = tensors(torch.float32)
    base["m.q.weight"][0, 0] += 1
    save_file(base, model / "model.safetensors")
    adapter["m.q" + B][0, 0] += 1
    save_file(adapter, version / "model-00000.safetensors")
    weights = merged(model, version, manifest)
    dict(weights)
    assert weights.wrong == [
        f"m.q{B} in {version} is not the trainer's",
        f"m.q.weight in {model} is not the trainer's",
    ]


def test_a_base_model_without_the_matrix_is_named(tmp_path: Path):
    model, version, manifest = written(tmp_path, torch.float32)
    save_file({"m.norm.weight": torch.zeros(4)}, model / "model.safetensors")
    weights = merged(model, version, manifest)
    dict(weights)
    assert weights.wrong == [f"m.q.weight is not in {model}"]


def test_names_say_whose_tensor_it_is():
    _, adapter = tensors(torch.float32)
    assert adapted(adapter) == {"m.q.weight"}
    assert all(map(is_adapter, adapter))
    assert not is_adapter("m.q.weight")
    assert factors_of("m.q.weight", adapter).a is adapter["m.q" + A]


class Worker(VersionLoader):
    """vLLM's worker, as far as loading goes: it remembers what its loader was given."""

    def __init__(self, model: Path) -> None:
        self.device = torch.device("cpu")
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(model)))
        self.model_runner = SimpleNamespace(get_model=torch.nn.Module)
        self.given: dict[str, Any] = {}

    def reload_weights(self, weights_iterator: Any = None, weights_path: Any = None) -> None:
        self.given = dict(weights_iterator) if weights_iterator else {}
        if weights_path:
            self.vllm_config.model_config.model = weights_path


@pytest.fixture
def worker_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Worker]:
    monkeypatch.setattr("libra_cli.node.rollout.worker._pack_tied_heads", lambda model: None)
    monkeypatch.setattr("libra_cli.node.rollout.worker.order_again", lambda model: None)
    monkeypatch.setattr(
        "libra_cli.node.rollout.worker.held_parts", lambda model, dtypes: [dict(dtypes)]
    )
    monkeypatch.setattr(
        "libra_cli.node.rollout.worker.layers_with", lambda model, base, some: set(some)
    )
    return Worker


def whole_version(directory: Path) -> str:
    directory.mkdir()
    (directory / MANIFEST).write_text(json.dumps({"tensors": {}}))
    return str(directory)


def test_a_worker_merges_into_the_model_it_began_with_whatever_it_has_loaded_since(
    tmp_path: Path, worker_of: Callable[[Path], Worker]
):
    model, version, manifest = written(tmp_path, torch.bfloat16)
    worker = worker_of(model)
    for other in ("first", "second"):
        worker.load_version(whole_version(tmp_path / other))
        answer = worker.load_version(str(version))
        weights = merged(model, version, manifest)
        wanted = dict(weights)
        assert worker.given.keys() == wanted.keys()
        assert all(torch.equal(worker.given[name], wanted[name]) for name in wanted)
        assert answer["expected"] == weights.expected
        assert answer["held"] == [{"m.q.weight": "bfloat16", "m.norm.weight": "bfloat16"}]
        assert answer["wrong"] == []


def test_the_next_adapter_brings_the_layers_that_have_one_and_all_is_proved(
    tmp_path: Path, worker_of: Callable[[Path], Worker]
):
    model, version, _ = written(tmp_path, torch.bfloat16)
    worker = worker_of(model)
    first = worker.load_version(str(version))
    second = worker.load_version(str(version))
    assert worker.given.keys() == {"m.q.weight"}
    assert second["expected"] == first["expected"]
    assert second["held"] == first["held"]


def test_after_an_adapter_of_another_base_model_everything_is_brought_again(
    tmp_path: Path, worker_of: Callable[[Path], Worker]
):
    model, version, manifest = written(tmp_path, torch.bfloat16)
    other = tmp_path / "other"
    shutil.copytree(version, other)
    manifest["adapter"]["base"]["m.q.weight"]["checksum"] = "0" * 16
    (other / MANIFEST).write_text(json.dumps(manifest))
    worker = worker_of(model)
    worker.load_version(str(version))
    for directory, wrong in ((other, 1), (other, 1), (version, 0)):
        assert len(worker.load_version(str(directory))["wrong"]) == wrong
        assert worker.given.keys() == {"m.q.weight", "m.norm.weight"}


def test_after_a_load_a_gpu_s_memory_is_given_back(
    tmp_path: Path, worker_of: Callable[[Path], Worker], monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []
    monkeypatch.setattr("libra_cli.node.rollout.worker.held_parts", lambda *_: done.append("held"))
    monkeypatch.setattr("libra_cli.node.rollout.worker.locks_for", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("given back"))
    worker, version = worker_of(tmp_path), whole_version(tmp_path / "version")
    worker.load_version(version)
    assert done == ["held"], "a CPU has no cache of torch's"
    worker.device = torch.device("cuda")
    worker.load_version(version)
    assert done[1:] == ["held", "given back"]
