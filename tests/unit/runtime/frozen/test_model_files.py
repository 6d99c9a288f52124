"""The files of frozen models: how they are read on a host, and what two hosts say of theirs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.config.errors import ProcessError
from libra_cli.config.recipe import Recipe
from libra_cli.core.frozen.files import difference, digest_of
from libra_cli.core.frozen.slots import frozen_slots
from libra_cli.core.launch.process import HostFacts, ProcessSpec
from libra_cli.core.records import FrozenModelRecord, Record
from libra_cli.node.checks import model_files
from libra_cli.runtime.frozen.files import ServedFiles

RECIPE = Recipe.model_validate(
    {
        "nodes": [
            {"host": "a", "slots": 3, "pool": ["rollout", "train", "models"]},
            {"host": "b", "slots": 2, "pool": "models"},
        ],
        "model": {"path": "/policy"},
        "environment": {"args": {"judge": {"served": "judge"}}},
        "models": [{"name": "judge", "path": "~/judge", "slots": 3}],
    }
)


def model(directory: Path, *, last: bytes = b"x") -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(2**20 - 1) + last)
    (directory / "README.md").write_text(str(directory))
    return directory


def test_files_have_the_digests_of_sha256sum(tmp_path: Path) -> None:
    directory = model(tmp_path / "judge")
    files = model_files.files_of(directory, tmp_path / "known.json")
    said = subprocess.run(
        ["sha256sum", "config.json", "model.safetensors"],
        cwd=directory,
        capture_output=True,
        check=True,
        timeout=10,
    ).stdout
    assert [f"{digest}  {name}" for name, (_, digest) in files.items()] == said.decode().split(
        "\n"
    )[:-1]
    assert files["model.safetensors"][0] == 2**20
    assert digest_of(files) == hashlib.sha256(said).hexdigest()


def test_a_file_is_read_again_only_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, known = model(tmp_path / "judge"), tmp_path / "known.json"
    read: list[str] = []
    real = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        read.append(Path(file.name).name)
        return real(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    first = model_files.files_of(directory, known)
    assert sorted(read) == ["config.json", "model.safetensors"]
    assert model_files.files_of(directory, known) == first
    assert len(read) == 2
    weights = directory / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    weights.write_bytes(bytes(2**20))
    os.utime(weights, ns=times)  # as old as before, as rsync -t leaves it
    assert difference(model_files.files_of(directory, known), first) == (
        "model.safetensors has other bytes"
    )
    assert read[2:] == ["model.safetensors"]
    known.write_text('[["cut')
    model_files.files_of(directory, known)
    assert len(read) == 5


def test_a_file_that_changes_while_it_is_read_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model(tmp_path / "judge")

    def growing(file: Any, name: str) -> Any:
        with Path(file.name).open("ab") as more:
            more.write(b"more")
        return hashlib.new(name)

    monkeypatch.setattr(hashlib, "file_digest", growing)
    with pytest.raises(OSError, match="has changed while it was read"):
        model_files.files_of(directory, tmp_path / "known.json")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.json": (1, "0")}, "b.json is not there"),
        ({"a.json": (1, "0"), "b.json": (2, "0"), "c.py": (1, "0")}, "c.py is only there"),
        ({"a.json": (3, "0"), "b.json": (2, "0")}, "a.json has 3 bytes, not 1"),
        ({"a.json": (1, "0"), "b.json": (2, "1")}, "b.json has other bytes"),
        ({"a.json": (1, "0"), "b.json": (2, "0")}, ""),
    ],
)
def test_the_file_that_differs_is_named(files: dict[str, tuple[int, str]], said: str) -> None:
    assert difference(files, {"a.json": (1, "0"), "b.json": (2, "0")}) == said


class Hosts:
    """Stands for the cluster: each host is a directory, and its processes are real."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.running = self.most = 0
        self.facts = {
            node: HostFacts(node, sys.executable, "/w", str(directory / node), "/v", node)
            for node in ("a", "b")
        }
        self.hosts = {
            node: SimpleNamespace(
                expand=lambda path, at=directory / node: path.replace("~", f"{at}")
            )
            for node in ("a", "b")
        }

    def clock(self) -> float:
        return 0.0

    async def answer_of(self, spec: ProcessSpec, *, timeout_s: float) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        process = await asyncio.create_subprocess_exec(
            *spec.argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        told, _ = await asyncio.wait_for(process.communicate(), 30)
        self.running -= 1
        if process.returncode:
            raise ProcessError(told.decode())
        return json.loads(told.splitlines()[-1])


def compared(hosts: Hosts, *places: int) -> tuple[list[str], list[FrozenModelRecord]]:
    """Compare the servers at these places of the recipe at once; their digests and the rows."""
    rows: list[FrozenModelRecord] = []

    def save(record: Record) -> None:
        assert isinstance(record, FrozenModelRecord)
        rows.append(record)

    async def main() -> list[str]:
        there: Any = hosts
        files, slots = ServedFiles(there, save), frozen_slots(RECIPE.models, RECIPE.nodes)
        return await asyncio.gather(*(files.compare(slots[place]) for place in places))

    return asyncio.run(main()), rows


def test_hosts_with_the_same_files_serve_one_model(tmp_path: Path) -> None:
    for node in ("a", "b"):
        model(tmp_path / node / "judge")
    hosts = Hosts(tmp_path)
    digests, rows = compared(hosts, 0, 1, 2)
    assert len(set(digests)) == 1
    assert sorted((row.node, row.path, row.bytes) for row in rows) == [
        ("a", "~/judge", 2**20 + 2),
        ("b", "~/judge", 2**20 + 2),
        ("b", "~/judge", 2**20 + 2),
    ]
    assert hosts.most == 2, "servers of one host read the same disk"


def test_a_host_with_one_other_byte_is_refused_with_both_names(tmp_path: Path) -> None:
    model(tmp_path / "a/judge")
    model(tmp_path / "b/judge", last=b"y")
    with pytest.raises(ProcessError) as caught:
        compared(Hosts(tmp_path), 0, 1)
    said = str(caught.value)
    one, other = ("a", "b") if said.startswith("~/judge on b") else ("b", "a")
    assert said == (
        f"~/judge on {other} is not what {one} has there: model.safetensors has other bytes"
    )
    assert caught.value.hint.startswith(f"on {other}: rsync -a {one}:~/judge/ ~/judge/;")


def test_a_model_that_is_not_there_is_told_as_the_host_says_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ProcessError, match=r"No such file or directory: '.*/a/judge'"):
        compared(Hosts(tmp_path), 0)
