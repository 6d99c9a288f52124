"""Machines with different numbers of ranks form one world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from libra_cli.core.launch.accelerate import Accelerate
from libra_cli.core.launch.process import HostFacts
from libra_cli.core.launch.trainer import MachineRanks
from tests.live import require
from tests.trainers import free_port

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(300)]
require("accelerate")


def test_two_ranks_here_and_one_there_are_a_world_of_three(tmp_path: Path):
    facts = HostFacts("n", sys.executable, "/w", str(tmp_path), "/s", "127.0.0.1")
    port = free_port()
    processes = []
    for machine, ranks in enumerate((2, 1)):
        world = MachineRanks(
            machine=machine,
            machines=2,
            ranks_here=ranks,
            ranks=3,
            head_address="127.0.0.1",
            rendezvous_port=port,
            gpus=False,
            dtype="bfloat16",
            even=False,
        )
        command = Accelerate().command(facts, world, "tests.told_ranks", str(tmp_path))
        env = {**os.environ, **command.env, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command.argv, env=env))
    try:
        assert [process.wait(240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    told = [json.loads((tmp_path / f"{rank}.json").read_bytes()) for rank in range(3)]
    assert listening(tmp_path) == {"0100007F"}
    assert told == [[[0, 0, "bf16"], [1, 1, "bf16"], [2, 0, "bf16"]]] * 3


def listening(directory: Path) -> set[str]:
    """Every address at which a rank or a launcher listened."""
    files = [*directory.glob("listening-*.json")]
    assert len(files) == 3
    return {address for file in files for address in json.loads(file.read_bytes())}
