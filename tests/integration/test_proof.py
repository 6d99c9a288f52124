"""Which version a real vLLM server holds: proved in bfloat16, over two ranks, with tied weights.

The model is trained a little and then takes steps of 1e-6, which change log-probabilities by less
than vLLM and the trainer differ on the same weights. The server computes logits in float32.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("accelerate", reason="needs the [cpu] extra")
pytest.importorskip("vllm", reason="needs the [cpu] extra")

import torch
from safetensors.torch import load_file, save_file

from libra_cli.config.errors import ServerError
from libra_cli.core.actions import SyncServer
from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.trainer.trainer import Trainer
from libra_cli.node.weights.chunks import MANIFEST
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import publish
from libra_cli.runtime.rollout.decode_check import EXPECTED, decode_gap
from libra_cli.runtime.weights.probe_bounds import probe_gap
from tests.gpu.model import REHEARSED, build
from tests.gpu.trainer import config_of
from tests.vllm_server import bench_of, published

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
LEARNING_RATE = 1e-6
STEPS = 2


@dataclass
class Published:
    """Versions of a bfloat16 trainer, a step of 1e-6 apart."""

    model_dir: Path
    versions: list[Path]
    adapters: list[Path]
    """Versions of a trainer of an adapter."""

    def manifest(self, version: int) -> dict[str, Any]:
        return _manifest(self.versions[version])


def _manifest(directory: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    return manifest


def _batch(step: int) -> list[TokenSample]:
    rng = np.random.default_rng(step)
    mask = np.array([0] * 10 + [1] * 20, dtype=np.int8)
    return [
        TokenSample(
            group=0,
            member=member,
            token_ids=rng.integers(4, REHEARSED.shape.vocabulary, len(mask), dtype=np.int32),
            logprobs=np.where(mask, np.float32(-7.0), np.float32(0)),
            loss_mask=mask,
            reward=float(member % 2),
            advantages=((0, 2.0 * (member % 2) - 1),),
            fresh=True,
        )
        for member in range(4)
    ]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    base = tmp_path_factory.mktemp("published")
    build(REHEARSED, base / "model", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        versions = _versions(base, "versions", {"learning_rate": LEARNING_RATE})
        lora = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj"]}
        adapters = _versions(base, "adapters", {"learning_rate": 1e-3, "lora": lora})
    return Published(base / "model", versions, adapters)


def _versions(base: Path, name: str, training: dict[str, Any]) -> list[Path]:
    """What a trainer publishes at its start and after each step."""
    trainer = Trainer(config_of(base, training, max_len=128))
    versions = []
    for step in range(STEPS + 1):
        if step:
            trainer.train(step, _batch(step))
        done = publish(
            whole((name, one.bfloat16()) for name, one in trainer.whole_weights()),
            base / name,
            version=step,
            trainer_incarnation=1,
            probe=trainer.probe(),
            keep=STEPS + 1,
            adapter=trainer.adapter_manifest(),
        )
        versions.append(base / name / done.name)
    trainer.close()
    return versions


@pytest.fixture(scope="module")
def bench(given, tmp_path_factory):
    host = tmp_path_factory.mktemp("host")
    head = {"fp32_lm_head": True}
    with bench_of(given.model_dir, host, dtype="bfloat16", ranks=2, model=head) as bench:
        yield bench


def load(bench, directory: Path, version: int, **options: Any) -> None:
    bench.play(
        lambda: bench.server.load(str(directory), published(version), timeout_s=60, **options)
    )


def changed(given: Published, version: int, base: Path, name: str) -> Path:
    """A version with the lowest bit of one number of one tensor turned over, as if by accident."""
    shutil.copytree(given.versions[version], base)
    path = base / given.manifest(version)["tensors"][name]["file"]
    tensors = load_file(path)
    tensors[name].view(torch.int16).view(-1)[-1] ^= 1
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    return base


def test_every_version_is_accepted_while_the_probe_cannot_tell_them_apart(
    given, bench, record_property
):
    gaps = []
    for version, directory in enumerate(given.versions):
        load(bench, directory, version)
        probe = given.manifest(version)["probe"]
        ids = probe["token_ids"]
        measured = bench.play(lambda v=version, ids=ids: bench.server.probe(ids, published(v)))
        gaps.append(probe_gap(tuple(probe["logprobs"]), measured))
        sync = SyncServer("local/0", 0, published(version))
        decoded = bench.play(lambda sync=sync, ids=ids: decode_gap(bench.server, sync, ids))
        record_property(f"decoded and scored, version {version}", decoded)
        assert decoded < EXPECTED["bfloat16", False].later
        if version:
            before = given.manifest(version - 1)["probe"]["logprobs"]
            moved = probe_gap(tuple(before), probe["logprobs"])
            record_property(f"gap and movement of version {version}", (gaps[-1], moved))
            assert moved < gaps[-1]
    assert max(gaps) < 5 * gaps[0]


def test_the_version_before_is_refused(given, bench, tmp_path):
    shutil.copytree(given.versions[1], tmp_path / "v")
    shutil.copy(given.versions[2] / MANIFEST, tmp_path / "v" / MANIFEST)
    with pytest.raises(ServerError, match="is not the one that was published"):
        load(bench, tmp_path / "v", 2)
    load(bench, given.versions[2], 2)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.3.self_attn.o_proj.weight",
        "model.layers.3.self_attn.k_norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_one_bit_of_one_tensor_is_noticed(given, bench, tmp_path, name):
    with pytest.raises(ServerError, match=name.replace(".", r"\.")):
        load(bench, changed(given, 2, tmp_path / "v", name), 2)
    load(bench, given.versions[2], 2)


def test_what_cannot_be_found_in_the_server_is_for_the_probe_only_if_so_wanted(
    given, bench, tmp_path
):
    shutil.copytree(given.versions[2], tmp_path / "v")
    manifest = given.manifest(2)
    manifest["tensors"]["visual.weight"] = manifest["tensors"]["model.norm.weight"]
    (tmp_path / "v" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ServerError, match=r"visual\.weight was not found.*weight_sync\.tolerance"):
        load(bench, tmp_path / "v", 2)
    load(bench, tmp_path / "v", 2, partly=True)


def test_an_adapter_is_merged_into_the_base_model_and_proved(given, bench, record_property):
    """In place of whole versions that were loaded before, and of one another."""
    sizes = [sum(path.stat().st_size for path in d.glob("*.safetensors")) for d in given.adapters]
    whole = sum(path.stat().st_size for path in given.versions[0].glob("*.safetensors"))
    record_property("bytes of an adapter and of a whole version", (sizes[0], whole))
    assert max(sizes) < whole / 10
    for version in (2, 0, 1, 2):
        load(bench, given.adapters[version], version)
        probe = _manifest(given.adapters[version])["probe"]
        ids = probe["token_ids"]
        measured = bench.play(lambda v=version, ids=ids: bench.server.probe(ids, published(v)))
        gap = probe_gap(tuple(probe["logprobs"]), measured)
        record_property(f"gap of adapter {version}", gap)
        assert gap < 0.02


def test_the_adapter_before_and_another_base_model_are_refused(given, bench, tmp_path):
    shutil.copytree(given.adapters[1], tmp_path / "before")
    shutil.copy(given.adapters[2] / MANIFEST, tmp_path / "before" / MANIFEST)
    with pytest.raises(ServerError, match=r"lora_[AB]\.weight in .* is not the trainer's"):
        load(bench, tmp_path / "before", 2)
    shutil.copytree(given.adapters[2], tmp_path / "other")
    manifest = _manifest(tmp_path / "other")
    manifest["adapter"]["base"]["model.layers.1.self_attn.o_proj.weight"]["checksum"] = "0" * 16
    (tmp_path / "other" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ServerError, match=r"1\.self_attn\.o_proj\.weight in .*/model is not"):
        load(bench, tmp_path / "other", 2)
    load(bench, given.adapters[2], 2)


def test_a_server_that_has_slept_loads_all_of_a_version_and_proves_it(given, bench):
    load(bench, given.adapters[1], 1)
    bench.play(bench.server.sleep)
    bench.play(bench.server.sleep)  # asked again by the next controller
    with pytest.raises(ServerError, match="is asleep"):
        load(bench, given.adapters[2], 2)
    bench.play(bench.server.wake)
    load(bench, given.adapters[2], 2)
    probe = _manifest(given.adapters[2])["probe"]
    measured = bench.play(lambda: bench.server.probe(probe["token_ids"], published(2)))
    assert probe_gap(tuple(probe["logprobs"]), measured) < 0.02
