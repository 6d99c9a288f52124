"""A version has several digests of each chunk, and a host checks the quickest that it knows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.weights import digests
from libra_cli.node.weights.chunks import CHUNK_BYTES, listed, listings, read_manifest
from libra_cli.node.weights.weight_server import WeightServer
from tests.credentials import credentials_of, url_of

NAME, FILE = "v000001-e0", "model.bin"
DATA = b"some weights" * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()
WRONG = "0" * 64


def manifest(**found: str) -> bytes:
    entry: dict[str, Any] = {"bytes": len(DATA), **{name: [one] for name, one in found.items()}}
    return json.dumps({"name": NAME, "files": {FILE: entry}}).encode()


def test_a_file_is_read_once_for_the_digests_of_every_chunk(tmp_path: Path) -> None:
    blake3 = pytest.importorskip("blake3").blake3
    data = bytes(range(256)) * (CHUNK_BYTES // 256) + b"the rest"
    (tmp_path / FILE).write_bytes(data)
    chunks = data[:CHUNK_BYTES], data[CHUNK_BYTES:]
    found = listings(tmp_path / FILE)
    assert found["sha256"].digests == tuple(hashlib.sha256(one).hexdigest() for one in chunks)
    assert found["blake3"].digests == tuple(blake3(one).hexdigest() for one in chunks)
    assert {one.bytes for one in found.values()} == {len(data)}
    assert listed(tmp_path / FILE, "sha256") == found["sha256"]


def test_the_quickest_digest_that_is_known_here_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("blake3")
    both = manifest(sha256=SHA256, blake3="b", unheard_of="c")
    assert read_manifest(both).files[FILE].algorithm == "blake3"
    assert read_manifest(manifest(sha256=SHA256)).files[FILE].digests == (SHA256,)
    monkeypatch.setattr(digests, "ALGORITHMS", {"sha256": hashlib.sha256})
    assert read_manifest(both).files[FILE].algorithm == "sha256"


def test_a_host_that_lacks_the_package_knows_the_standard_library_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", none)
    assert [*digests._known()] == ["sha256"]


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
@pytest.mark.parametrize("is_right", [True, False])
def test_a_pull_refuses_what_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, is_right: bool
) -> None:
    pytest.importorskip("blake3")
    known = {algorithm: digests.ALGORITHMS[algorithm]}
    right = known[algorithm](DATA).hexdigest()
    monkeypatch.setattr(digests, "ALGORITHMS", known)
    there = WeightServer(tmp_path / "there" / "run", credentials_of())
    here = WeightServer(tmp_path / "here" / "run", credentials_of())
    (there.root / NAME).mkdir()
    (there.root / NAME / FILE).write_bytes(DATA)
    told = {"sha256": WRONG, "blake3": WRONG, **({algorithm: right} if is_right else {})}
    (there.root / NAME / "manifest.json").write_bytes(manifest(**told))
    source = url_of(there.serve("127.0.0.1", 0))
    try:
        if is_right:
            assert here.pull(NAME, [source], 20.0).kind == "full"
            assert here.damaged(NAME) == ""
        else:
            with pytest.raises(AgentRefused, match="is damaged in chunk 0"):
                here.pull(NAME, [source], 20.0)
    finally:
        here.close()
        there.close()
