"""Fetches the ends of the logs of a run's processes from its hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import NodeSpec
from libra_cli.core.records import ProcessRecord
from libra_cli.runtime.doctor.remote_files import expanded
from libra_cli.runtime.hosts.cluster import transport_to
from libra_cli.runtime.hosts.transport import Transport

TAIL_BYTES = 500_000
"""Bytes that are fetched of the end of each log: some thousand lines."""
TAIL_S = 60.0


@dataclass(frozen=True, slots=True)
class HostLogs:
    """The ends of the logs on one host."""

    node: str
    logs: Mapping[str, bytes]
    """Ends of logs by process; ``agent`` is the host's agent."""
    problems: tuple[str, ...]
    """Why the host, or a log, cannot be read."""


async def host_logs(
    nodes: Sequence[NodeSpec], processes: Sequence[ProcessRecord]
) -> list[HostLogs]:
    """Ask all hosts at the same time; one that does not answer is told, and no error."""
    return await asyncio.gather(
        *(_of(node, [row for row in processes if row.node == node.name]) for node in nodes)
    )


async def _of(node: NodeSpec, processes: Sequence[ProcessRecord]) -> HostLogs:
    transport = transport_to(node)
    found: dict[str, bytes] = {}
    problems: list[str] = []
    try:
        await transport.connect()
        for name, path in _paths(processes).items():
            data, problem = await _tail(transport, path)
            if problem:
                problems.append(f"{node.name}: {name}: {problem}")
            else:
                found[name] = data
    except LibraError as error:
        problems.append(f"{node.name}: {str(error).removeprefix(f'{node.name}: ')}")
    finally:
        await transport.close()
    return HostLogs(node.name, found, tuple(problems))


def _paths(processes: Sequence[ProcessRecord]) -> dict[str, str]:
    """The log of every process, and of the agent, which lies beside their directory."""
    paths = {row.process: row.log for row in processes if row.log}
    if paths:
        logs = next(iter(paths.values())).rpartition("/")[0]
        paths.setdefault("agent", f"{logs.rpartition('/')[0]}/agent.log")
    return paths


async def _tail(transport: Transport, path: str) -> tuple[bytes, str]:
    argv = ["tail", "-c", str(TAIL_BYTES), "--", expanded(transport, path)]
    done = await transport.run(argv, timeout_s=TAIL_S)
    return done.stdout, done.last_words if done.exit_code else ""
