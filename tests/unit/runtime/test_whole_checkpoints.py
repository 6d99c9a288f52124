"""A run goes on from the newest checkpoint that is whole, whatever is damaged or gone."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from libra_cli.config.errors import StateError
from libra_cli.node.checkpoints.contents import about_bytes, listed
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.trainer.checkpoints import SERVE_S
from libra_cli.runtime.trainer.whole_checkpoints import VERIFY_S, WholeCheckpoint, newest_whole

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, Host]:
    made = {}
    for name in ("a", "b"):
        made[name] = host = Host(name, LocalTransport())
        host.run_dir, host.code_dir, host.python = str(tmp_path / name), str(ROOT), sys.executable
    return made


def part(hosts: Mapping[str, Host], node: str, name: str) -> Path:
    return Path(hosts[node].run_dir, "checkpoints", name)


def save(hosts: Mapping[str, Host], name: str, *nodes: str) -> None:
    """As the hosts' ranks write it: of each a shard, and a copy of the small files."""
    step = int(name.split("-")[1])
    files: dict[str, dict[str, Any]] = {}
    for number, node in enumerate(nodes):
        directory = part(hosts, node, name)
        directory.mkdir(parents=True)
        (directory / f"__{number}_0.distcp").write_bytes(f"{node} {step}".encode() * 9)
        (directory / "ledger.json").write_text(json.dumps({"step": step}))
        files |= listed(directory, ["ledger.json", f"__{number}_0.distcp"], node)
    about = {"step": step, "world_size": len(nodes), "score": None, "files": files}
    for node in nodes:
        (part(hosts, node, name) / "checkpoint.json").write_bytes(about_bytes(about))


def found(
    hosts: Mapping[str, Host], *known: str, last: int = 1
) -> tuple[WholeCheckpoint, list[str]]:
    notes: list[str] = []
    return asyncio.run(newest_whole(hosts, known, last, note=notes.append)), notes


def test_the_newest_on_the_disks_counts_though_nobody_had_heard_of_it(
    hosts: dict[str, Host],
) -> None:
    save(hosts, "step-000020-e1", "a", "b")
    whole, notes = found(hosts, "step-000010-e1")
    assert (whole.position, whole.trainer_incarnation, notes) == ({"step": 20}, 1, [])
    assert whole.path == str(part(hosts, "a", "step-000020-e1"))


@pytest.mark.parametrize("name", ["__1_0.distcp", "ledger.json", "checkpoint.json"])
def test_a_damaged_one_is_passed_over_and_told(hosts: dict[str, Host], name: str) -> None:
    save(hosts, "step-000010-e1", "a", "b")
    save(hosts, "step-000020-e1", "a", "b")
    (part(hosts, "b", "step-000020-e1") / name).write_bytes(b"\xff{")
    whole, notes = found(hosts, "step-000010-e1", "step-000020-e1")
    assert whole.position == {"step": 10}
    assert len(notes) == 1
    assert notes[0].startswith("checkpoint step-000020-e1 cannot be used: ")
    assert notes[0].endswith(" on b; going on from step-000010-e1")


def test_a_half_written_one_is_passed_over(hosts: dict[str, Host]) -> None:
    save(hosts, "step-000010-e1", "a", "b")
    save(hosts, "step-000020-e1", "a", "b")
    (part(hosts, "a", "step-000020-e1") / "checkpoint.json").unlink()
    part(hosts, "a", ".step-000030-e1").mkdir()
    assert found(hosts)[0].position == {"step": 10}


def test_whose_part_is_missing_is_told_by_name(hosts: dict[str, Host]) -> None:
    save(hosts, "step-000010-e1", "a")
    save(hosts, "step-000020-e1", "a", "b")
    del hosts["b"]
    whole, notes = found(hosts)
    assert whole.position == {"step": 10}
    assert "no host here has __1_0.distcp, which b wrote" in notes[0]


def test_without_a_whole_one_it_is_said_where_was_looked(hosts: dict[str, Host]) -> None:
    save(hosts, "step-000020-e1", "a", "b")
    del hosts["b"]
    with pytest.raises(
        StateError, match=r"step-000020-e1 cannot be used: .* which b wrote"
    ) as told:
        found(hosts)
    assert f"a:{part(hosts, 'a', '')}" in told.value.hint


def test_what_a_trainer_left_that_was_followed_by_another_is_none(hosts: dict[str, Host]) -> None:
    save(hosts, "step-000010-e1", "a")
    save(hosts, "step-000020-e1", "a")  # written, and the trainer died before it was heard of
    assert found(hosts, "step-000010-e1", last=2)[0].position == {"step": 10}
    assert found(hosts, "step-000010-e1", last=1)[0].position == {"step": 20}


def test_one_of_the_later_trainer_is_newer_and_no_name_is_given_twice(
    hosts: dict[str, Host],
) -> None:
    save(hosts, "step-000030-e1", "a")
    save(hosts, "step-000010-e3", "a")
    whole, _ = found(hosts, "step-000030-e1", last=2)
    assert (whole.position, whole.trainer_incarnation) == ({"step": 10}, 3)


def test_one_of_an_older_libra_is_taken_as_it_is(hosts: dict[str, Host]) -> None:
    directory = part(hosts, "a", "step-000050")
    directory.mkdir(parents=True)
    (directory / "checkpoint.json").write_text('{"step": 50, "world_size": 1}')
    (directory / "ledger.json").write_text('{"step": 50}')
    assert found(hosts, "step-000050")[0].position == {"step": 50}


def test_names_that_are_none_of_a_checkpoint_are_left_alone(hosts: dict[str, Host]) -> None:
    save(hosts, "step-000010-e1", "a")
    for name in ("..step", "step-x", "step-000099-e1.bak", "notes"):
        part(hosts, "a", name).mkdir()
    assert found(hosts)[0].position == {"step": 10}


def test_a_host_may_read_its_part_through_before_it_gives_it_away() -> None:
    assert SERVE_S >= VERIFY_S  # node.checkpoints.server does as node.checkpoints.verify
