"""Names that a host tells of its files, and code that lies there damaged."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import libra_cli
from libra_cli.config.errors import HostError
from libra_cli.runtime.hosts import upload
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.hosts.remote_files import fetch_tokenizer, names_in, safe_name
from libra_cli.runtime.hosts.transport import CommandResult
from libra_cli.runtime.hosts.upload import package, put_code


class Liar:
    """A host whose ``ls`` answers what it likes."""

    target = "liar"

    def __init__(self, listing: bytes) -> None:
        self.listing = listing

    async def run(self, argv: object, *, timeout_s: float) -> CommandResult:
        return CommandResult(0, self.listing, b"")

    async def get(self, path: str) -> bytes:
        return b"{}"


def test_a_name_from_a_host_cannot_write_elsewhere_on_the_controller(tmp_path) -> None:
    """Today ``/any/where/x.json`` in a listing is written there."""
    evil = tmp_path / "evil.json"
    listing = f"config.json\n{evil}\n../evil.json\n.hidden.json\na\x1b[2Jb.json\n\n"
    target = tmp_path / "model"
    asyncio.run(fetch_tokenizer(cast("Any", Liar(listing.encode())), "/m", target))
    assert [one.name for one in target.iterdir()] == ["config.json"]
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def test_a_directory_of_a_host_is_read_by_safe_names_only() -> None:
    found = asyncio.run(names_in(cast("Any", Liar(b"a b.json\n/etc/passwd\n\xff\n..\n")), "/m"))
    assert found == ["a b.json"]


@settings(max_examples=100)
@given(st.text() | st.from_regex(r"\.{0,3}/?[\w.]*/?[\w.]*"))
def test_a_safe_name_stays_in_its_directory(name) -> None:
    try:
        path = Path("/base", safe_name(name))
    except HostError:
        return
    assert path.parent == Path("/base")
    assert path.name == name
    assert name.isprintable()


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's copy of a small package, which is what is uploaded here."""
    files = {"libra_cli/__init__.py": b"", "libra_cli/node/agent.py": b"x = 1\n" * 1000}
    source = tmp_path / "source"
    for name, data in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    monkeypatch.setattr(libra_cli, "__file__", str(source / "libra_cli/__init__.py"))
    monkeypatch.setattr(upload, "package", package.__wrapped__)
    digest: str = package.__wrapped__()[1]
    return tmp_path / "work" / "code" / digest


def put(directory: Path) -> None:
    asyncio.run(put_code(LocalTransport(), "n1", sys.executable, str(directory)))


def test_truncated_code_on_a_host_is_put_aside_and_written_anew(code) -> None:
    put(code)
    whole = (code / "libra_cli/node/agent.py").read_bytes()
    (code / "libra_cli/node/agent.py").write_bytes(whole[:100])
    put(code)
    assert (code / "libra_cli/node/agent.py").read_bytes() == whole
    assert [one.name.partition(".")[2][:7] for one in sorted(code.parent.iterdir())] == [
        "",
        "damaged",
    ]


def test_whole_code_on_a_host_is_left_as_it_is(code) -> None:
    put(code)
    (code / "libra_cli/node/__pycache__").mkdir()
    put(code)
    assert (code / "libra_cli/node/__pycache__").is_dir()
    assert len(list(code.parent.iterdir())) == 1


def test_code_that_is_missing_in_part_is_written_anew(code) -> None:
    put(code)
    shutil.rmtree(code / "libra_cli/node")
    put(code)
    assert (code / "libra_cli/node/agent.py").exists()


def test_a_tree_that_cannot_be_written_leaves_nothing_of_it_here(tmp_path) -> None:
    """Each try at a full disk left another directory, which made it fuller."""
    files = {"a": b"x", "a/b": b"no directory can be where a file is"}
    with pytest.raises(HostError, match=r"local: .*/a"):
        asyncio.run(LocalTransport().put_tree(files, str(tmp_path / "code")))
    assert not any(tmp_path.iterdir())
