"""Version directories: whole or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from safetensors.torch import load_file  # noqa: E402

from libra_cli.node.weights import files, layout, patch  # noqa: E402
from libra_cli.node.weights import versions as weights  # noqa: E402
from libra_cli.node.weights.chunks import CHUNK_BYTES, MANIFEST  # noqa: E402
from libra_cli.node.weights.tensor_rows import whole  # noqa: E402
from libra_cli.node.weights.versions import (  # noqa: E402
    ProbeResult,
    probe_tokens,
    publish,
    version_name,
)
from libra_cli.node.weights.weight_server import WeightServer  # noqa: E402
from tests.credentials import credentials_of, url_of  # noqa: E402

PROBE = ProbeResult([1, 2, 3], [-0.5, -1.5])
TENSORS = {
    "model.embed.weight": torch.arange(12.0).reshape(3, 4),
    "lm_head.weight": torch.ones(3, 4, dtype=torch.bfloat16),
}


@pytest.fixture(autouse=True)
def _time_for_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(files, "DELTA_S", 20.0)


def write(
    root: Path, version: int, *, incarnation: int = 0, keep: int = 2
) -> weights.VersionOnDisk:
    return publish(
        whole(TENSORS.items()),
        root,
        version=version,
        trainer_incarnation=incarnation,
        probe=PROBE,
        keep=keep,
    )


def digests(data: bytes) -> list[str]:
    """Of every chunk of a file."""
    starts = range(0, len(data), CHUNK_BYTES)
    return [hashlib.sha256(data[at : at + CHUNK_BYTES]).hexdigest() for at in starts]


def test_the_manifest_describes_what_is_on_disk(tmp_path: Path):
    published = write(tmp_path / "run", 7, incarnation=2)
    directory = tmp_path / "run" / "v000007-e2"
    assert published.name == directory.name
    manifest = json.loads((directory / MANIFEST).read_text())
    assert manifest["version"] == 7
    assert manifest["trainer_incarnation"] == 2
    assert manifest["probe"] == {"token_ids": [1, 2, 3], "logprobs": [-0.5, -1.5]}
    loaded: dict[str, Any] = {}
    for name, file in manifest["files"].items():
        data = (directory / name).read_bytes()
        assert (len(data), digests(data)) == (file["bytes"], file["sha256"])
        loaded |= load_file(directory / name)
    assert sum(file["bytes"] for file in manifest["files"].values()) == published.bytes
    assert set(loaded) == set(manifest["tensors"]) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor)
        assert manifest["tensors"][name]["shape"] == [3, 4]
    assert manifest["tensors"]["lm_head.weight"]["dtype"] == "bfloat16"


def test_only_versions_are_counted_and_removed_as_old_ones(tmp_path: Path):
    outbox = tmp_path / "vision-exp-20260101-0" / "gradient"
    outbox.mkdir(parents=True)
    for version in (1, 2, 3):
        write(tmp_path, version)
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"v000002-e0", "v000003-e0", "vision-exp-20260101-0"}


def test_a_large_model_is_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "FILE_BYTES", 10)
    write(tmp_path, 1)
    manifest = json.loads((tmp_path / "v000001-e0" / MANIFEST).read_text())
    assert len(manifest["files"]) == 2
    assert {tensor["file"] for tensor in manifest["tensors"].values()} == set(manifest["files"])


def test_a_failure_half_way_leaves_nothing(tmp_path: Path):
    def broken() -> Iterator[tuple[str, Any]]:
        yield from TENSORS.items()
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        publish(whole(broken()), tmp_path, version=1, trainer_incarnation=0, probe=PROBE, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed(tmp_path: Path):
    (tmp_path / ".v000001-e0.123").mkdir()
    write(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["v000002-e0"]


def test_only_the_last_versions_are_kept(tmp_path: Path):
    for version in range(5):
        write(tmp_path, version, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000003-e0", "v000004-e0"]


def test_a_restarted_trainer_publishes_under_another_name(tmp_path: Path):
    write(tmp_path, 3, incarnation=0)
    write(tmp_path, 3, incarnation=1)
    assert {path.name for path in tmp_path.iterdir()} == {version_name(3, 0), version_name(3, 1)}


# -- deltas --------------------------------------------------------------------------------------


def policy(step: int, *, share: float = 0.02) -> dict[str, Any]:
    """A model in bf16 of which every step moves a share of the values by one."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(300, 100, generator=generator).bfloat16() for name in ("a.weight", "b")
    }
    for _ in range(step):
        for tensor in tensors.values():
            moved = torch.rand(tensor.shape, generator=generator) < share
            tensor.view(torch.int16).add_(moved.short())
    return tensors


def advance(root: Path, version: int, **changes: Any) -> dict[str, Any]:
    """Publish, and give the manifest."""
    tensors = changes.get("tensors", policy(version))
    publish(
        whole(tensors.items()),
        root,
        version=version,
        trainer_incarnation=changes.get("incarnation", 0),
        probe=PROBE,
        keep=2,
    )
    name = version_name(version, changes.get("incarnation", 0))
    manifest: dict[str, Any] = json.loads((root / name / MANIFEST).read_text())
    return manifest


def deltas(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*/*.delta"))


def test_a_version_names_the_deltas_that_make_it_of_the_one_before(tmp_path: Path):
    assert advance(tmp_path, 1)["delta"] is None
    delta = advance(tmp_path, 2)["delta"]
    assert delta["base"] == "v000001-e0"
    ((name, listed),) = delta["files"].items()
    data = (tmp_path / "v000002-e0" / name).read_bytes()
    assert name == "model-00000.safetensors.delta"
    assert (len(data), digests(data)) == (listed["bytes"], listed["sha256"])
    assert len(data) < 0.03 * 2 * 2 * 30_000


def test_every_file_of_a_large_model_has_a_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "FILE_BYTES", 10)
    advance(tmp_path, 1)
    manifest = advance(tmp_path, 2)
    assert {*manifest["delta"]["files"]} == {f"{name}.delta" for name in manifest["files"]}
    assert len(deltas(tmp_path)) == 2


def test_one_file_that_changed_too_much_leaves_no_delta_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layout, "FILE_BYTES", 10)
    advance(tmp_path, 1)
    other = {**policy(2), "b": torch.rand(300, 100).bfloat16()}
    other["b"].view(torch.int16).random_(-(2**15), 2**15)
    assert advance(tmp_path, 2, tensors=other)["delta"] is None
    assert deltas(tmp_path) == []


@pytest.mark.parametrize("change", ["a version is missing", "restarted", "other shapes"])
def test_without_the_same_trainers_version_before_there_is_no_delta(tmp_path: Path, change: str):
    advance(tmp_path, 1)
    version = 3 if change == "a version is missing" else 2
    incarnation = int(change == "restarted")
    tensors = {"a.weight": torch.ones(4, 4)} if change == "other shapes" else policy(2)
    manifest = advance(tmp_path, version, incarnation=incarnation, tensors=tensors)
    assert manifest["delta"] is None
    assert deltas(tmp_path) == []


def test_a_delta_that_cannot_be_written_does_not_stop_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: object, **__: object) -> bool:
        raise OSError("no space left on device")

    advance(tmp_path, 1)
    monkeypatch.setattr(patch, "encode", full)
    assert advance(tmp_path, 2)["delta"] is None
    assert "is published without a delta: no space left" in caplog.text


def test_a_host_that_follows_is_bit_identical_at_every_version(tmp_path: Path):
    there = WeightServer(tmp_path / "trainer" / "run", credentials_of())
    here = WeightServer(tmp_path / "host" / "run", credentials_of())
    source = url_of(there.serve("127.0.0.1", 0))
    try:
        kinds = []
        for version in range(4):
            manifest = advance(there.root, version)
            pulled = here.pull(manifest["name"], [source], patience_s=20.0)
            kinds.append(pulled.kind)
            assert pulled.detail == ""
            for file in (there.root / manifest["name"]).iterdir():
                assert (Path(pulled.path) / file.name).read_bytes() == file.read_bytes()
        assert kinds == ["full", "delta", "delta", "delta"]
    finally:
        here.close()
        there.close()


def test_every_process_probes_with_the_same_tokens():
    tokens = probe_tokens(268, 64)
    assert tokens == probe_tokens(268, 64)
    assert len(set(tokens)) > 32
    assert all(0 <= token < 268 for token in tokens)
