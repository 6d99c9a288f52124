"""What ``libra ps`` lists of a host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from typing import Any

import pytest

from libra_cli.app.operations import targets
from libra_cli.config.errors import RecipeError
from libra_cli.node.inventory import owned as inventory
from libra_cli.node.inventory.owned import owned, parse_memory
from libra_cli.report.terminal.operations import owned_view
from tests import sample_run


def test_processes_of_any_run_are_listed_with_their_lease(tmp_path, monkeypatch) -> None:
    run = f"ps-{os.getpid()}"
    place = tmp_path / run / "n1"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    marker = {"LIBRA_RUN": run, "LIBRA_NODE": "n1", "LIBRA_PROCESS": "server-0"}
    asked: list[object] = []
    with (
        socket.socket(socket.AF_UNIX) as agent,
        subprocess.Popen(["sleep", "60"], env={**os.environ, **marker}) as process,
    ):
        agent.bind("agent.sock")
        agent.listen()

        def answer() -> None:
            connection, _ = agent.accept()
            with connection, connection.makefile("rwb") as file:
                asked.append(json.loads(file.readline())["op"])
                result = {"left_s": 100.0, "heard_s": 20.0}
                file.write(json.dumps({"id": 1, "ok": True, "result": result}).encode() + b"\n")

        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setattr(inventory, "gpu_memory", lambda: {process.pid: 512, 1: 2048})
        try:
            found = owned(tmp_path)
        finally:
            process.kill()
    (row,) = [one for one in found["processes"] if one["run"] == run]
    assert (row["node"], row["process"], row["pid"], row["gpu_mib"]) == (
        "n1",
        "server-0",
        process.pid,
        512,
    )
    assert abs(time.time() - row["since"]) < 10
    assert found["leases"][f"{run}/n1"] == {"left_s": 100.0, "heard_s": 20.0}
    assert asked == ["lease"], "which renews nothing"
    (other,) = found["others"]
    assert (other["pid"], other["gpu_mib"], other["user"]) == (1, 2048, "root")


def test_memory_of_one_process_on_several_gpus_is_added() -> None:
    assert parse_memory("7, 100\n7, 50\n8, [N/A]\nNo devices were found\n") == {7: 150, 8: 0}


def test_the_table_fits_80_columns_and_a_terminal_obeys_nothing_in_it(capsys) -> None:
    from rich.console import Console

    row = {
        "run": "a-recipe-with-a-long-name-20261122-201010",
        "node": "gpu-01.example.org",
        "process": "server-0\x1b[2J",
        "pid": 1234567,
        "since": time.time() - 3 * 86400,
        "gpu_mib": 78000,
    }
    lease = {f"{row['run']}/{row['node']}": {"left_s": 100.0, "heard_s": 20.0}}
    other = {"pid": 9, "user": "bob", "command": "python \x1b]0;x\x07", "gpu_mib": 400}
    told = {"processes": [row, {**row, "node": "n2"}], "leases": lease, "others": [other]}
    answers: list[dict[str, Any]] = [
        {"node": "n1", "told": told, "error": ""},
        {"node": "n3", "told": None},
    ]
    Console(width=80, force_terminal=False).print(owned_view(answers))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    assert "100s" in shown
    assert "none" in shown
    assert "not ours, on n1: 400 MiB by bob, pid 9" in shown


def test_of_a_host_that_did_not_answer_nothing_is_claimed(capsys) -> None:
    from rich.console import Console

    free = {"node": "n1", "told": {"processes": [], "leases": {}, "others": []}}
    console = Console(width=80, force_terminal=False)
    console.print(owned_view([free]))
    console.print(owned_view([free, {"node": "n2", "told": None}]))
    console.print(owned_view([{"node": "n2", "told": None}]))
    assert capsys.readouterr().out.split("\n")[:3] == [
        "no run owns anything on these hosts",
        "no run owns anything on the hosts that answered",
        "",
    ]


def test_hosts_must_be_named() -> None:
    with pytest.raises(RecipeError, match="whose hosts"):
        targets(None, [])
    assert [node.host for node in targets(None, ["a", "b"]).nodes] == ["a", "b"]


def test_a_run_is_known_by_its_id_whatever_its_directory_is_called(tmp_path) -> None:
    run_dir = sample_run.write_whole(tmp_path / "renamed")
    assert targets(run_dir, []).run == sample_run.run_record().id
