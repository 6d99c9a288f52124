"""What environments would make in their first episodes is made before anything is played."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken, HostLost
from libra_cli.runtime.episodes.places import EnvironmentSource
from libra_cli.runtime.hosts.transport import ByteStream

DEADLINE_S = 60.0


async def lost(node: str, process: str, module: str) -> ByteStream:
    raise HostLost(f"{node}: no answer")


def prepared(name: str = "tests.prepared:Prepared", limit_s: float = 0.0, **keys: Any) -> list[str]:
    """Prepare an environment; returns the lines that are told. ``limit_s`` bounds all calls that
    have a limit, once the first of them has ended."""
    spec = EnvironmentSpec.model_validate({"name": name, **keys})
    told: list[str] = []

    async def scene() -> None:
        source = EnvironmentSource(spec, name, open_on=lost)

        def note(text: str) -> None:
            source.calls.limit_s = limit_s or source.calls.limit_s
            told.append(text)

        try:
            await source.prepare(note)
        finally:
            await source.close()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_S))
    return told


def made(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("workers", [None, 2])
def test_everything_is_made_once_and_told_however_long_it_takes(
    tmp_path: Path, workers: int | None
) -> None:
    keys: dict[str, Any] = {
        "args": {"directory": str(tmp_path), "seconds": 0.1},
        "workers": workers,
    }
    first, last = prepared(**keys, limit_s=0.01)
    assert made(tmp_path) == ["a", "b", "c"]
    assert first == "environment tests.prepared:Prepared: preparing 1 of 3 tasks: a"
    assert last.startswith("environment tests.prepared:Prepared: 3 tasks prepared in ")
    assert prepared(**keys) == [], "nothing is left to do"


def test_only_what_the_recipes_rows_name_is_made(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"name": one, "level": 1}) + "\n" for one in ("c", "d")))
    (directory := tmp_path / "made").mkdir()
    prepared(args={"directory": str(directory)}, tasks=str(rows))
    assert made(directory) == ["c"]


@pytest.mark.parametrize("workers", [None, 2])
def test_what_cannot_be_made_is_an_error(tmp_path: Path, workers: int | None) -> None:
    args = {"directory": str(tmp_path), "names": ["a", "broken", "c"]}
    with pytest.raises(EnvironmentBroken, match="broke in prepare: OSError: no space left"):
        prepared(args=args, workers=workers)
    assert made(tmp_path) == ["a"]


def test_an_environment_with_nothing_to_make_tells_nothing() -> None:
    assert prepared("pointer-chase") == []


def test_a_node_that_is_not_reached_has_errors_of_its_own(tmp_path: Path) -> None:
    workers = {"processes": 1, "nodes": ["down"]}
    assert prepared(args={"directory": str(tmp_path)}, workers=workers) == []
    assert made(tmp_path) == []
