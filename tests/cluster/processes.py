"""A run's processes by what they do, found by the marker that all of them inherit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run")


class Role(StrEnum):
    """What a process of a run is there for."""

    SERVER = "server"
    """The process of a server that the controller speaks to."""
    ENGINE = "engine"
    """vLLM's EngineCore, of a server that has one beside it."""
    WORKER = "worker"
    """vLLM's worker, of a server with several ranks."""
    TRAINER = "trainer"
    """A rank of the trainer."""
    LAUNCHER = "launcher"
    """What started the ranks of a host."""
    GRADIENT = "gradient"
    """A rank of a gradient worker."""
    AGENT = "agent"
    GUARD = "guard"
    """What holds the lease beside the agent."""
    BRIDGE = "bridge"
    """The host's end of the controller's connection to its agent."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RunProcess:
    """One process of a run."""

    pid: int
    role: Role
    name: str
    """As the run calls it: ``server-0``, ``trainer-0``, ``agent``."""


def processes_of(run_id: str, pids: Iterable[int]) -> list[RunProcess]:
    """Those of the processes that carry the run's marker, or are bridges to its agents."""
    found = (_process(run_id, pid) for pid in pids)
    return [one for one in found if one is not None]


def send(processes: Iterable[RunProcess], number: signal.Signals) -> None:
    """A signal to each that is still there."""
    for one in processes:
        with suppress(ProcessLookupError):
            os.kill(one.pid, number)


def _process(run_id: str, pid: int) -> RunProcess | None:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
        block = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return None
    if state in "ZX":
        return None
    command = words.replace("\0", " ")
    if f"/runs/{run_id}/" in command and "agent.main attach" in command:
        return RunProcess(pid, Role.BRIDGE, "bridge")
    environment = dict(entry.partition("=")[::2] for entry in block.split("\0"))
    if environment.get("LIBRA_RUN") != run_id:
        return None
    name = environment.get("LIBRA_PROCESS", "")
    return RunProcess(pid, _role(pid, name, command), name)


def _role(pid: int, name: str, command: str) -> Role:
    kind = name.partition("-")[0]
    if kind in (Role.AGENT, Role.GUARD):
        return Role(kind)
    if "VLLM::EngineCore" in command:
        return Role.ENGINE
    if "VLLM::Worker" in command:
        return Role.WORKER
    if any(launcher in command for launcher in LAUNCHERS):
        return Role.LAUNCHER
    if kind == Role.SERVER:
        return Role.SERVER if _leads(pid) else Role.OTHER
    return Role(kind) if f"libra_cli.node.{kind}.main" in command else Role.OTHER


def _leads(pid: int) -> bool:
    """Whether it is the process that was asked for, and not one that this has started."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
