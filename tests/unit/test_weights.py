"""Version directories: whole or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from safetensors.torch import load_file  # noqa: E402

from libra_cli.errors import WeightsError  # noqa: E402
from libra_cli.node import weights  # noqa: E402
from libra_cli.node.weights import MANIFEST, Probe, probe_tokens, publish, version_name  # noqa: E402

pytestmark = pytest.mark.vllm
PROBE = Probe([1, 2, 3], [-0.5, -1.5])
TENSORS = {
    "model.embed.weight": torch.arange(12.0).reshape(3, 4),
    "lm_head.weight": torch.ones(3, 4, dtype=torch.bfloat16),
}


def write(root: Path, version: int, *, epoch: int = 0, keep: int = 2) -> weights.Published:
    return publish(
        TENSORS.items(), root, version=version, trainer_epoch=epoch, probe=PROBE, keep=keep
    )


def test_the_manifest_describes_what_is_on_disk(tmp_path: Path):
    published = write(tmp_path / "run", 7, epoch=2)
    directory = tmp_path / "run" / "v000007-e2"
    assert published.name == directory.name
    manifest = json.loads((directory / MANIFEST).read_text())
    assert manifest["version"] == 7
    assert manifest["trainer_epoch"] == 2
    assert manifest["probe"] == {"token_ids": [1, 2, 3], "logprobs": [-0.5, -1.5]}
    loaded: dict[str, Any] = {}
    for name, file in manifest["files"].items():
        data = (directory / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
        loaded |= load_file(directory / name)
    assert sum(file["bytes"] for file in manifest["files"].values()) == published.bytes
    assert set(loaded) == set(manifest["tensors"]) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor)
        assert manifest["tensors"][name]["shape"] == [3, 4]
    assert manifest["tensors"]["lm_head.weight"]["dtype"] == "bfloat16"


def test_a_large_model_is_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "FILE_BYTES", 10)
    write(tmp_path, 1)
    manifest = json.loads((tmp_path / "v000001-e0" / MANIFEST).read_text())
    assert len(manifest["files"]) == 2
    assert {tensor["file"] for tensor in manifest["tensors"].values()} == set(manifest["files"])


def test_a_failure_half_way_leaves_nothing(tmp_path: Path):
    def broken() -> Iterator[tuple[str, Any]]:
        yield from TENSORS.items()
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        publish(broken(), tmp_path, version=1, trainer_epoch=0, probe=PROBE, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_names_that_servers_do_not_know_are_refused_at_start(tmp_path: Path):
    write(tmp_path, 1)
    weights.check_names(["lm_head.weight"], tmp_path / "v000001-e0")
    with pytest.raises(WeightsError, match=r"for example experts\.gate_up"):
        weights.check_names(["lm_head.weight", "experts.gate_up"], tmp_path / "v000001-e0")


def test_what_a_killed_writer_left_is_removed(tmp_path: Path):
    (tmp_path / ".v000001-e0.123").mkdir()
    write(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["v000002-e0"]


def test_only_the_last_versions_are_kept(tmp_path: Path):
    for version in range(5):
        write(tmp_path, version, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000003-e0", "v000004-e0"]


def test_a_restarted_trainer_publishes_under_another_name(tmp_path: Path):
    write(tmp_path, 3, epoch=0)
    write(tmp_path, 3, epoch=1)
    assert {path.name for path in tmp_path.iterdir()} == {version_name(3, 0), version_name(3, 1)}


def test_every_process_probes_with_the_same_tokens():
    tokens = probe_tokens(268, 64)
    assert tokens == probe_tokens(268, 64)
    assert len(set(tokens)) > 32
    assert all(0 <= token < 268 for token in tokens)
