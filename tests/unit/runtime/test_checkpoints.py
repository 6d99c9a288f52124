"""Which checkpoints the hosts of a run have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from libra_cli.config.errors import StateError
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.trainer.checkpoints import best_of, find_checkpoints, read_ledger


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, Host]:
    made = {}
    for name in ("a", "b", "never"):
        made[name] = Host(name, LocalTransport())
        made[name].run_dir = str(tmp_path / name)
    return made


def save(hosts: dict[str, Host], step: int, *nodes: str, score: float | None = None) -> None:
    for node in nodes:
        directory = Path(hosts[node].run_dir, "checkpoints", f"step-{step:06d}-e1")
        directory.mkdir(parents=True)
        (directory / "checkpoint.json").write_text(json.dumps({"step": step, "score": score}))
        (directory / "ledger.json").write_text(json.dumps({"step": step}))


def test_a_checkpoint_is_found_on_every_host_that_has_its_part(hosts: dict[str, Host]) -> None:
    save(hosts, 20, "a", "b", score=0.5)
    save(hosts, 10, "b", score=0.75)
    Path(hosts["a"].run_dir, "checkpoints", "step-000030-e1").mkdir()  # it is not complete
    found = asyncio.run(find_checkpoints(hosts))
    assert [(one.step, one.nodes) for one in found] == [(10, ("b",)), (20, ("a", "b"))]
    best = best_of(found)
    assert best is not None
    assert best.step == 10


def test_of_checkpoints_without_a_score_none_is_the_best(hosts: dict[str, Host]) -> None:
    save(hosts, 10, "a")
    assert best_of(asyncio.run(find_checkpoints(hosts))) is None


def test_a_ledger_is_read_from_whoever_has_it(hosts: dict[str, Host]) -> None:
    save(hosts, 10, "b")
    assert asyncio.run(read_ledger(hosts, "step-000010-e1")) == {"step": 10}
    with pytest.raises(StateError, match="no host has a part of the checkpoint step-000020-e1"):
        asyncio.run(read_ledger(hosts, "step-000020-e1"))
