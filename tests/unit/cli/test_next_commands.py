"""An error ends with what to type next, and that leads somewhere."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from libra_cli.cli.main import app
from libra_cli.config.errors import ExitCode, HostError
from libra_cli.config.recipe import Recipe
from libra_cli.core.records import ProcessRecord
from libra_cli.runtime.hosts.ssh import SshTransport
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.nearby_runs import command_for_another
from libra_cli.runtime.store.run_directory import keep_recipe
from libra_cli.runtime.tinker.address import ServiceAddress
from tests.sample_run import write, write_whole

RECIPE = "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\nenvironment: {name: calculator}\n"
VERL = "actor_rollout_ref:\n  rollout: {n: 4}\nalgorithm: {adv_estimator: grpo}\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"r.yaml": RECIPE, "verl.yaml": VERL, "a.yaml": "a: 1\n"}.items():
        Path(name).write_text(text)
    ServiceAddress("http://127.0.0.1:9", "key").write(Path("weights"))


def libra(typed: str) -> str:
    return CliRunner().invoke(app, shlex.split(typed)).output


@pytest.mark.parametrize(
    ("typed", "told", "following"),
    [
        ("init 'gpu-[03-01]'", "gpu-[03-01] has a range that falls", "libra init 'gpu-[01-06]'"),
        ("init gpu-01,gpu-02", "is no host", "libra init gpu-01 gpu-02"),
        ("init -o nodir/x.yaml", "nodir/x.yaml: there is no directory nodir", "mkdir -p nodir"),
        ("ps", "whose hosts?", "libra ps RECIPE"),
        ("gc", "whose hosts?", "libra gc RECIPE --dry-run"),
        ("import verl.yaml --from trl", "names nothing that tells", "libra import verl.yaml"),
        ("import a.yaml --from trl", "names nothing that tells", "libra help migration"),
        ("import verl.yaml -o nodir/x.yaml", "nodir/x.yaml cannot be written", "mkdir -p nodir"),
        ("export --best --step 2", "each choose the checkpoint", "libra export RUN_DIR --step 2"),
        ("status --watch --json", "prints one object and ends", "libra status --json"),
        ("status weights --watch", "weights is of libra tinker", "libra status weights"),
        ("tasks check nope", "nope is neither a directory of tasks", "libra tasks make nope"),
    ],
)
def test_an_error_names_what_can_be_typed(typed, told, following):
    output = " ".join(libra(typed).split())
    assert told in output
    assert following in output.partition("next: ")[2]


def test_a_wrong_run_directory_names_the_run_that_was_meant_or_how_to_make_one():
    assert command_for_another(Path("runs/first")) == "libra quickstart makes a run"
    for name in ("first", "second", "elsewhere/third"):
        write(Path("runs") / name if "/" not in name else Path(name))
    assert command_for_another(Path("runs/firstly")) == "libra status runs/first"
    assert command_for_another(Path("elsewhere/thrd")) == "libra status elsewhere/third"
    following = command_for_another(Path("x"))
    assert following.startswith("libra status ")
    assert libra(following.removeprefix("libra "))


def test_logs_of_what_is_not_there_name_what_is():
    write(Path("runs/one"))
    assert "next: libra logs local --run runs/one" in libra("logs gpu-99")
    assert "next: libra logs local model --run runs/one" in libra("logs local nothing")


def test_a_log_that_is_gone_is_told_after_those_that_are_there(tmp_path):
    write_whole(Path("run"))
    there = tmp_path / "there.log"
    there.write_text("its words\n")
    with Journal(Path("run")) as journal:
        for name, log in (("server-8", there), ("server-9", tmp_path / "gone.log")):
            journal.save(ProcessRecord("local", name, 7, "exited", 1.0, 0, str(log)))
    shown = CliRunner().invoke(app, ["logs", "local", "server-8", "--run", "run"])
    assert (shown.exit_code, shown.output) == (ExitCode.FINISHED, "its words\n")
    gone = CliRunner().invoke(app, ["logs", "local", "server-9", "--run", "run"])
    assert gone.exit_code == ExitCode.HOST_PROBLEM
    assert "gone.log" in gone.output
    assert "next: libra ps run" in gone.output
    assert "its words" in libra("logs local --run run")


def test_an_export_that_reaches_no_host_says_how_to_try_one(monkeypatch):
    async def connect(self: SshTransport) -> None:
        raise HostError("gpu-01: no route", hint="ssh gpu-01 true")

    monkeypatch.setattr(SshTransport, "connect", connect)
    write(Path("run"))
    keep_recipe(
        Recipe.model_validate({"nodes": [{"host": "gpu-01", "gpus": 2}], "model": {"build": {}}}),
        Path("run"),
    )
    assert "next: ssh gpu-01 true" in libra("export run")
