"""``libra collect`` puts what a bug report needs into one archive, and no secret."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tarfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from libra_cli.cli.main import app
from libra_cli.config.errors import HostError
from libra_cli.config.recipe import Recipe
from libra_cli.config.secrets import MASK
from libra_cli.core import records as r
from libra_cli.runtime.doctor import host_logs
from libra_cli.runtime.hosts.cluster import transport_to
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.hosts.transport import CommandResult
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.run_directory import keep_recipe
from libra_cli.runtime.store.token_file import TOKENS
from tests import sample_run

SECRET = "correct-horse-battery"
OLD_RUN = Path(__file__).parents[2] / "fixtures/0.1.0"
RECIPE = {
    "nodes": [{"host": "local", "slots": 3, "address": "127.0.0.1"}, {"host": "gone"}],
    "model": {"build": {}},
    "environment": {"secrets": {"SEARCH": SECRET}, "args": {"url": f"http://me:{SECRET}@host/"}},
}


class Gone(LocalTransport):
    """A host that cannot be reached."""

    async def connect(self, *, timeout_s: float = 1.0) -> None:
        raise HostError("gone: no route to host", hint="ssh gone")

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float
    ) -> CommandResult:
        raise AssertionError("it was not reached")


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    where = sample_run.write(tmp_path / "runs/quickstart-1", steps=6)
    keep_recipe(Recipe.model_validate(RECIPE), where)
    (where / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    logs = tmp_path / "host/logs"
    logs.mkdir(parents=True)
    (logs.parent / "agent.log").write_text("the agent says\n")
    (logs / "server-0.log").write_text(f"old\nHF_TOKEN={SECRET}\nBearer abcdefgh12345678\n")
    process = r.ProcessRecord("local", "server-0", 7, "exited", 1.0, 1, str(logs / "server-0.log"))
    lost = replace(process, process="lost", log=str(logs / "lost.log"))
    slot = sample_run.slot_record(
        "local/0", "rollout", "failed", 3.0, detail=f"401 for https://u:{SECRET}@index/simple"
    )
    with Journal(where) as journal:
        for record in (process, lost, slot):
            journal.save(record)
        journal.event(3.0, "ServerFailed", {"reason": f"password={SECRET}"})
    monkeypatch.setattr(
        host_logs,
        "transport_to",
        lambda node: Gone() if node.name == "gone" else transport_to(node),
    )
    return where


def collected(*arguments: str) -> tuple[str, dict[str, bytes]]:
    done = CliRunner().invoke(app, ["collect", *arguments, "-o", "c.tar.gz"])
    assert done.exit_code == 0, done.output
    with tarfile.open("c.tar.gz") as tar:
        tar.extractall("out", filter="data")
        names = tar.getnames()
    files = {name.partition("/")[2]: Path("out", name).read_bytes() for name in names}
    return done.output, files


def test_the_archive_has_what_is_needed_and_says_so(run_dir):
    told, files = collected(str(run_dir))
    assert set(files) == {
        "README.txt",
        "versions.json",
        "status.json",
        "recipe.json",
        "metrics.jsonl",
        "libra.db",
        "logs/local/server-0.log",
        "logs/local/agent.log",
        "problems.txt",
    }
    for name in files:
        assert f"  {name}  " in told
    assert told.splitlines()[-1].startswith("c.tar.gz (0.")
    assert files["logs/local/agent.log"] == b"the agent says\n"
    versions = json.loads(files["versions.json"])
    assert versions["packages"]["pydantic"]
    assert json.loads(files["status.json"])["format"] == 2


def test_no_file_of_it_has_a_secret(run_dir):
    told, files = collected(str(run_dir))
    assert [name for name, data in files.items() if SECRET.encode() in data] == []
    assert files["logs/local/server-0.log"].decode() == f"old\nHF_TOKEN={MASK}\nBearer {MASK}\n"
    assert MASK in json.loads(files["status.json"])["slots"][0]["detail"]
    assert "7 secrets masked" in told


def test_a_secret_of_the_environment_is_masked_wherever_it_stands(run_dir, monkeypatch):
    monkeypatch.setenv("MY_SEARCH_TOKEN", "the agent says")
    _, files = collected(str(run_dir))
    assert files["logs/local/agent.log"].decode() == f"{MASK}\n"


def test_libra_logs_masks_what_looks_like_a_secret(run_dir, monkeypatch):
    monkeypatch.setenv("SEARCH_TOKEN", "old-and-known")
    log = run_dir.parents[1] / "host/logs/server-0.log"
    log.write_text(log.read_text() + "it said old-and-known\n")
    done = CliRunner().invoke(app, ["logs", "local", "server-0", "--run", str(run_dir)])
    assert done.output.splitlines() == [
        "old",
        f"HF_TOKEN={MASK}",
        f"Bearer {MASK}",
        f"it said {MASK}",
    ]


def test_hosts_and_logs_that_are_not_there_are_named_and_no_error(run_dir):
    told, files = collected(str(run_dir))
    problems = files["problems.txt"].decode()
    assert "gone: no route to host" in problems
    assert "local: lost: " in problems
    assert "not there: gone: no route to host" in told


def test_the_database_opens_and_has_no_token_ids(run_dir):
    before = CliRunner().invoke(app, ["status", str(run_dir), "--json"]).output
    collected(str(run_dir))
    copy = Path("out/libra-quickstart-1")
    after = CliRunner().invoke(app, ["status", str(copy), "--json"])
    assert after.exit_code == 0
    told, was = json.loads(after.output), json.loads(before)
    for key in ("step", "reward", "trajectories", "sync", "batches"):
        assert told[key] == was[key]
    assert (run_dir / TOKENS).exists()
    assert not list(copy.rglob(TOKENS))
    with closing(sqlite3.connect(copy / "libra.db")) as db:
        kept = db.execute("SELECT DISTINCT branches_json FROM trajectories")
        assert kept.fetchall() == [("[]",)]
        (payload,) = db.execute(
            "SELECT payload_json FROM events WHERE kind = 'ServerFailed'"
        ).fetchone()
    assert json.loads(payload) == {"reason": f"password={MASK}"}


def test_the_run_is_left_as_it_was(run_dir):
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    collected(str(run_dir))
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    assert Path("c.tar.gz").stat().st_mode & 0o077 == 0


def test_an_archive_in_place_of_another_file_is_its_owners_alone(run_dir):
    Path("c.tar.gz").touch()
    Path("c.tar.gz").chmod(0o644)
    collected(str(run_dir))
    assert Path("c.tar.gz").stat().st_mode & 0o077 == 0


def test_a_run_that_is_being_written_is_collected(run_dir):
    with Journal(run_dir) as journal:
        journal.save(sample_run.run_record())
        told, files = collected()
    assert "libra.db" in files
    assert "MB)" in told


def test_a_run_of_an_older_libra_is_collected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_logs, "transport_to", lambda node: Gone())
    old = shutil.copytree(OLD_RUN, tmp_path / "elastic-1")
    _, files = collected(str(old))
    assert "libra.db" in files
    assert b"metrics.jsonl" in files["problems.txt"]


def test_what_is_no_run_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["collect", "nowhere"])
    assert done.exit_code == 2
    assert "next:" in done.output
    assert list(tmp_path.iterdir()) == []
