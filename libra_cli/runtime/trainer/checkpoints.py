"""Where the parts of a checkpoint are, and how a host gets what only the others have.

Every train host keeps its own part, ``<run directory there>/checkpoints/<name>``. A trainer that
starts again elsewhere, or in another split, needs some of the others' parts, and so does whoever
makes a model of a checkpoint. For as long as they read, a small server on each host that has a part
gives it away (``node.checkpoints.server``); it is started over the transport itself, so it needs no
agent, and its standard input ties its life to ours.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from libra_cli.config.errors import HostError, LibraError, StateError
from libra_cli.config.recipe import NodeSpec
from libra_cli.core.launch.process import PeerAddress
from libra_cli.core.records import EvaluationRecord
from libra_cli.runtime.credentials.authority import peer_url
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.remote_files import names_in
from libra_cli.runtime.hosts.transport import ByteStream
from libra_cli.runtime.supervision.answers import finite, understood

COMMAND_S = 30.0
SERVE_S = 1800.0
"""Seconds until a server of a checkpoint begins, which reads the host's part through before: 1 TB
at 600 MB/s. A host that is lost ends the wait."""
_INCARNATION = re.compile(r"-e(\d+)(?:-merged)?$")
ABOUT = "checkpoint.json"
"""The file that a part has once it is complete: step, world size, score."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """One checkpoint of a run, as the hosts have it."""

    name: str
    step: int
    score: float | None
    nodes: tuple[str, ...]
    """The hosts that have a part of it."""


def checkpoint_name(path: str) -> str:
    """The name of a checkpoint's directory, which it has on every host."""
    return path.rstrip("/").rpartition("/")[2]


def directory_of(host: Host, name: str) -> str:
    """Where a host keeps its part of a checkpoint."""
    return f"{host.run_dir}/checkpoints/{name}"


async def find_checkpoints(hosts: Mapping[str, Host]) -> list[FoundCheckpoint]:
    """The complete checkpoints of these hosts, by step; one that does not answer has none."""
    listed = await asyncio.gather(*(_listed(host) for host in hosts.values()))
    about: dict[str, dict[str, object]] = {}
    nodes: dict[str, list[str]] = {}
    for node, found in zip(hosts, listed, strict=True):
        for name, told in found.items():
            about[name] = told
            nodes.setdefault(name, []).append(node)
    checkpoints = [
        FoundCheckpoint(
            name,
            int(str(told["step"])),
            float(str(score)) if (score := told.get("score")) is not None else None,
            tuple(nodes[name]),
        )
        for name, told in about.items()
    ]
    return sorted(checkpoints, key=lambda one: (one.step, one.name))


async def _listed(host: Host) -> dict[str, dict[str, object]]:
    """What a host's complete checkpoints say of themselves, by name."""
    root, found = directory_of(host, ""), {}
    with suppress(HostError):
        for name in await names_in(host.transport, root):
            with suppress(HostError, StateError):
                told = await host.transport.get(f"{root}{name}/{ABOUT}")
                with understood(StateError, f"{root}{name}/{ABOUT}"):
                    found[name] = _about(told)
    return found


def _about(told: bytes) -> dict[str, object]:
    """Step and score; raises as JSON does, and where they are no numbers."""
    about = json.loads(told)
    step, score = index(about["step"]), about.get("score")
    return {"step": step, "score": None if score is None else finite(score)}


@asynccontextmanager
async def given_by(
    hosts: Mapping[str, tuple[Host, NodeSpec]],
    addresses: Mapping[str, PeerAddress],
    name: str,
    secrets: RunSecrets,
    *,
    needed_on: str = "",
) -> AsyncIterator[tuple[str, ...]]:
    """The URLs at which hosts give their parts of a checkpoint meanwhile; a lone host needs none.

    ``addresses`` are where the other hosts reach each; the host ``needed_on`` alone needs the rest.
    """
    hosts = {node: pair for node, pair in hosts.items() if node != needed_on}
    if not hosts or (len(hosts) < 2 and not needed_on):
        yield ()
        return
    async with AsyncExitStack() as stack:
        started = [
            _started(stack, host, spec, addresses[node], name, secrets)
            for node, (host, spec) in hosts.items()
        ]
        urls = await asyncio.gather(*started)
        yield tuple(url for url in urls if url)


async def _started(
    stack: AsyncExitStack,
    host: Host,
    spec: NodeSpec,
    address: PeerAddress,
    name: str,
    secrets: RunSecrets,
) -> str:
    """The URL of a host's server; empty if the host has no part, or does not answer."""
    argv = host.module_argv("libra_cli.node.checkpoints.server")
    first, last = spec.port_range
    try:
        stream: ByteStream = await host.transport.open_stream(
            [*argv, directory_of(host, name), address.listens_at, str(first), str(last)]
        )
        stack.push_async_callback(stream.close)
        async with asyncio.timeout(SERVE_S):
            await stream.write(json.dumps(credentials_of(host, secrets)).encode() + b"\n")
            port = (await answer_of(stream)).get("port")
    except (LibraError, TimeoutError):
        return ""
    return peer_url(address.serves_at, port, host.name) if port else ""


def credentials_of(host: Host, secrets: RunSecrets) -> dict[str, str]:
    """The fields of ``node.credentials.Credentials`` for a process that no agent starts."""
    return {"token": secrets.token, **secrets.credentials_of(host.name)}


async def answer_of(stream: ByteStream) -> dict[str, Any]:
    """The JSON object that a module of ours prints, after what a login script may have printed.

    Empty if it ends without one.
    """
    while line := await stream.readline():
        with suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    return {}


def scored_by(
    checkpoints: Sequence[FoundCheckpoint],
    evaluations: Sequence[EvaluationRecord],
    names: Sequence[str],
) -> list[FoundCheckpoint]:
    """Return the checkpoints with the scores of the evaluation ``names[0]``, the recipe's first, or
    as they are where that has never finished.
    """
    told = [one for one in evaluations if one.name in names[:1] and one.score is not None]
    if not told:
        return list(checkpoints)
    return [replace(one, score=_score_of(one, checkpoints, told)) for one in checkpoints]


def _score_of(
    checkpoint: FoundCheckpoint,
    checkpoints: Sequence[FoundCheckpoint],
    told: Sequence[EvaluationRecord],
) -> float | None:
    """Return the score of a checkpoint's own weights: its trainer's, or that of a later one that
    went on from it. An earlier trainer had others at that step, from which the run went back."""
    own = _incarnation(checkpoint.name)
    same_step = [_incarnation(one.name) for one in checkpoints if one.step == checkpoint.step]
    again = min((one for one in same_step if one > own), default=float("inf"))
    scores = {
        one.trainer_incarnation: one.score
        for one in told
        if one.step == checkpoint.step and own <= one.trainer_incarnation < again
    }
    return scores.get(own, scores[max(scores)] if scores else None)


def _incarnation(name: str) -> int:
    """Return the trainer incarnation in the name of a checkpoint, or of its model; -1 for none."""
    match = _INCARNATION.search(name)
    return int(match[1]) if match else -1


def best_of(checkpoints: Sequence[FoundCheckpoint]) -> FoundCheckpoint | None:
    """The one with the highest score, the oldest of equals; None where none has a score."""
    scored = [one for one in checkpoints if one.score is not None]
    return max(scored, key=lambda one: (one.score or 0.0, -one.step), default=None)
