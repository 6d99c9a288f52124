"""``libra stop``, where the controller is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.app import stop
from libra_cli.cli.main import app
from libra_cli.config.errors import HostLost

DEADLINE_S = 10.0


def test_a_host_that_does_not_answer_keeps_no_other_from_being_stopped(monkeypatch) -> None:
    stopped = asyncio.Event()

    class FakeHost:
        def __init__(self, node: Any) -> None:
            self.name = node.name

        async def stop_remains(self, run_id: str) -> tuple[str, ...]:
            if self.name == "silent":
                await stopped.wait()
                raise HostLost("silent: no answer")
            stopped.set()
            return ("7 (server)",)

    monkeypatch.setattr(stop, "host_of", FakeHost)
    nodes = [SimpleNamespace(name=name) for name in ("silent", "n2")]
    recipe: Any = SimpleNamespace(nodes=nodes, run=SimpleNamespace(lease_s=120.0))

    async def scene() -> list[str]:
        return await asyncio.wait_for(stop._stop_remains(recipe, "r"), DEADLINE_S)

    assert asyncio.run(scene()) == [
        "silent: silent: no answer; its lease of 120 s ends what runs there",
        "n2: 7 (server)",
    ]


@pytest.mark.parametrize(("left", "code"), [([], 0), (["n2: 7 (server)"], 3)])
def test_what_may_be_left_is_an_exit_code_of_its_own(monkeypatch, left, code) -> None:
    monkeypatch.setattr(stop, "stop", lambda run_dir, *, at_once, note: left)
    done = CliRunner().invoke(app, ["stop", "runs/r"])
    assert done.exit_code == code
    assert ("nothing of this run is left" in done.output) is (not left)
    assert all(f"not proved gone: {line}" in done.output for line in left)
