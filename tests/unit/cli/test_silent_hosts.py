"""Of hosts that do not answer nothing is told as fine: nobody has looked there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from libra_cli.cli.main import app
from libra_cli.config.errors import ExitCode, HostError
from libra_cli.runtime.hosts.ssh import SshTransport

FAR = "{host: gpu-01, gpus: 1, pool: train}", "{host: gpu-02, gpus: 1, pool: rollout}"


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch) -> None:
    async def connect(self: SshTransport) -> None:
        raise HostError(f"{self.target}: no route", hint=f"ssh {self.target} true")

    monkeypatch.setattr(SshTransport, "connect", connect)


def libra(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, " ".join(done.output.split())


def recipe(place: Path, *nodes: str, model: str = "build: {}") -> str:
    """The path of a recipe with these nodes."""
    path = place / "r.yaml"
    path.write_text(
        f"nodes: [{', '.join(nodes)}]\nmodel: {{{model}}}\nenvironment: {{name: calculator}}\n"
        "planner: {kind: fixed}\n"
    )
    return str(path)


def test_the_doctor_counts_no_check_as_fine(tmp_path):
    code, told = libra("doctor", recipe(tmp_path, *FAR))
    assert (code, "0 checks fine, " in told) == (ExitCode.HOST_PROBLEM, True)
    assert "no route" in told
    assert "uses no GPUs" not in told
    code, told = libra("doctor", recipe(tmp_path, *FAR), "--json")
    found = json.loads(told[told.index("[") :])
    severities = {one["severity"] for one in found if one["check"] != "reach"}
    assert (code, severities) == (ExitCode.HOST_PROBLEM, {"unknown"})


@pytest.mark.parametrize("command", ["ps", "gc"])
def test_ps_and_gc_say_what_they_did_not_look_at(tmp_path, command):
    code, told = libra(command, recipe(tmp_path, *FAR))
    assert code == ExitCode.HOST_PROBLEM
    assert "gpu-02 was not looked at: " in told
    assert "next: ssh " in told
    assert "no run owns" not in told
    assert "MB removed" not in told


def test_setup_does_not_know_whether_a_silent_host_has_the_model(tmp_path):
    nodes = ("{host: local, address: 10.0.0.1, pool: rollout}", FAR[0])
    code, told = libra("setup", recipe(tmp_path, *nodes, model=f"path: {tmp_path}/none"))
    assert code == ExitCode.HOST_PROBLEM
    assert "gpu-01: no route next: ssh " in told
    assert "none is neither here nor on any host that answers next: " in told
