"""Sandboxes on a host that is reached by real SSH end with the controller, however that ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import traceback
from pathlib import Path

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.core.types import TrajectoryId
from libra_cli.runtime.episodes.player import Episodes
from tests.integration.test_environment_hosts import cluster_of, renderer
from tests.integration.test_hosts import PULSE_S, net, opened, run_id
from tests.netns import Network, SshHost, marked, missing
from tests.sandboxes import needs_sandboxes

LEASE_S = 3.0
DEADLINE_S = 60.0
ESCAPED = "sleep 56789"
"""What a model has left running in a session of its own."""
__all__ = ["net", "renderer", "run_id"]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(missing()), reason=missing()),
    needs_sandboxes,
]


def test_nothing_is_left_when_controller_and_agent_are_killed(
    net: Network, tmp_path: Path, run_id: str, renderer
) -> None:
    show_all_of_proc(net, net.hosts[0])
    rows = tmp_path / "tasks.jsonl"
    rows.write_text(json.dumps({"instruction": "Wait.", "check": "true"}))
    spec = EnvironmentSpec.model_validate(
        {
            "name": "shell",
            "tasks": str(rows),
            "sandbox": {},
            "workers": {"processes": 2, "nodes": "host-1"},
        }
    )

    async def scene(told: int) -> None:
        async with opened(net, 0, tmp_path, run_id, lease_s=LEASE_S, ping_interval_s=PULSE_S) as (
            host,
            _,
        ):
            cluster = cluster_of({"host-1": host}, run_id)
            episodes = Episodes([spec], ["shell"], renderer, open_on=cluster.open_stream)
            await episodes.check(seed=0)
            await episodes.start(TrajectoryId(0, 0), 0, task_seed=0, seed=0)
            command = f"setsid {ESCAPED} >/dev/null 2>&1 & sleep 0.2; id -u"
            call = json.dumps({"name": "bash", "arguments": {"command": command}})
            turn = renderer.encode(f"<tool_call>\n{call}\n</tool_call>")
            result = await episodes.advance(
                TrajectoryId(0, 0), [*turn, renderer.end_of_turn], "stop"
            )
            os.write(told, result.returns[0].outcome.value.encode())
            await asyncio.sleep(DEADLINE_S)

    heard, told = os.pipe()
    controller = os.fork()
    if controller == 0:
        try:
            asyncio.run(scene(told))
        except BaseException as error:  # noqa: BLE001  told to the test
            os.write(told, "".join(traceback.format_exception(error)).encode()[-4000:])
        finally:
            os._exit(1)
    os.close(told)
    try:
        said = os.read(heard, 4000).decode()
        assert said == "ok", said
        assert found(ESCAPED), "it runs in the sandbox"
        assert found("bwrap"), "on the host"
    finally:
        os.close(heard)
        os.kill(controller, signal.SIGKILL)
        os.waitpid(controller, 0)
    for pid in found(f"agent.main serve .*{run_id}"):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LEASE_S + 20
    while left := [*found(ESCAPED), *marked(run_id)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def show_all_of_proc(net: Network, host: SshHost) -> None:
    """Take away the boot id of the host's own: the kernel lets nobody mount a /proc beside one that
    is covered in part, as containers' are."""
    inside = ["nsenter", "--target", str(net.machine(host).init), "--mount", "--pid"]
    subprocess.run([*inside, "umount", "/proc/sys/kernel/random/boot_id"], check=True)


def found(words: str) -> list[int]:
    """The processes whose command line has these words, as a regular expression."""
    done = subprocess.run(["pgrep", "-f", "--", words], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]
