"""``libra setup`` without SSH: what it reads here and on a host, and what it writes there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from libra_cli.config.errors import HostLost, InputError
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.runtime.doctor import setup as module
from libra_cli.runtime.doctor.environment import HostEnvironment, Packages
from libra_cli.runtime.doctor.remote_files import HostFiles, LocalFiles
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.hosts.transport import CommandResult


def test_a_model_in_a_cache_of_links_is_read_as_any_other(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (blobs / name[:3]).write_text(name)
        (snapshot / name).symlink_to(blobs / name[:3])
    there = asyncio.run(HostFiles(LocalTransport(), str(snapshot)).hashes())
    assert sorted(there) == ["config.json", "model.safetensors"]
    assert there == asyncio.run(LocalFiles(snapshot).hashes())


def test_files_here_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read here: .*No such file") as told:
        asyncio.run(LocalFiles(tmp_path / "model").hashes())
    assert told.value.hint == f"ls -l {tmp_path / 'model'}"


def test_a_model_that_nobody_may_look_at_here_is_sought_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)  # whoever is root may look anywhere
    assert module._model_here(str(tmp_path)) is None


def test_a_work_directory_that_is_not_there_is_made_for_what_packages_need(tmp_path: Path) -> None:
    node = NodeSpec(host="gpu-1", workdir=str(tmp_path / "scratch/libra"))
    environment = HostEnvironment(node, LocalTransport())
    asyncio.run(environment._install("true", Packages(()), ()))
    assert (tmp_path / "scratch/libra/overrides.txt").is_file()


class Dropping(LocalTransport):
    """A host whose connection drops at the first command that begins with ``at``."""

    def __init__(self, at: str) -> None:
        self._at = at

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float
    ) -> CommandResult:
        """Run a command as here, or lose the connection."""
        if argv[0] == self._at:
            raise HostLost("a: the connection dropped", hint="ssh a true")
        return await super().run(argv, stdin=stdin, timeout_s=timeout_s)


class Silent:
    """Shows nobody how far it is."""

    def stage(self, host: str, what: str) -> None:
        """Show nothing."""

    def bytes(self, host: str, count: int) -> None:
        """Show nothing."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, on hosts whose environments are made with no work."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text("{}")

    async def make(self: HostEnvironment, packages: Packages, **told: object) -> str:
        return "made"

    monkeypatch.setattr(HostEnvironment, "make", make)
    return place


def prepared(model: Path, first: LocalTransport, monkeypatch) -> list[module.SetupResult]:
    """What is told of two hosts, which both have the directory of the model."""
    transports = {"a": first, "b": LocalTransport()}
    monkeypatch.setattr(module, "transport_to", lambda node: transports[node.name])
    document = {
        "nodes": [{"host": "a", "gpus": 1}, {"host": "b", "gpus": 1}],
        "model": {"path": str(model)},
    }
    setup = module.Setup(
        Recipe.model_validate(document), Silent(), environments=["a", "b"], models=["a", "b"]
    )
    return asyncio.run(setup.run(lambda node: Packages(())))


@pytest.mark.parametrize("at", ["test", "sh"])
def test_a_host_that_drops_while_it_is_asked_for_the_model_is_that_hosts_failure(
    model: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(module, "_model_here", lambda path: None)
    lost, other = prepared(model, Dropping(at), monkeypatch)
    assert (lost.done, lost.error) == (("made",), "a: the connection dropped")
    assert lost.hint == "ssh a true"
    assert (other.done, other.error) == (("made",), ""), "it has the model itself"


def test_a_model_here_that_cannot_be_read_leaves_what_was_made_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(directory: Path) -> dict[str, str]:
        raise PermissionError(13, "Permission denied", str(directory / "config.json"))

    monkeypatch.setattr("libra_cli.runtime.doctor.remote_files._hashes", refused)
    for result in prepared(model, LocalTransport(), monkeypatch):
        assert result.done == ("made",)
        assert result.error.startswith(f"{result.host}: {model} cannot be read here: ")
        assert result.hint == f"ls -l {model}"


def test_a_model_that_nobody_has_leaves_what_was_made_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "config.json").unlink()
    for result in prepared(model, LocalTransport(), monkeypatch):
        assert result.done == ("made",)
        assert result.error == f"{result.host}: {model} is neither here nor on any host"
        assert result.hint == f"here: hf download ORGANISATION/NAME --local-dir {model}"
