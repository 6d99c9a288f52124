"""Has a host make a Hugging Face directory of a checkpoint, and brings it to the controller.

It is made on a host that trains, from that host's part of the checkpoint and the others', at
``<run directory there>/export/<checkpoint>``, over the transport alone: so it can be made while the
run goes on, after its end and after it was killed, as long as the hosts keep their directories.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.config.errors import ProcessError
from libra_cli.config.recipe import NodeSpec
from libra_cli.core.launch.process import PeerAddress
from libra_cli.core.records import ExportRecord
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.remote_files import names_in
from libra_cli.runtime.trainer.checkpoints import (
    FoundCheckpoint,
    answer_of,
    credentials_of,
    directory_of,
    given_by,
)

MERGED = "-merged"
"""The end of the directory's name of what an adapter was merged into."""
EXPORT_S = 3600.0
"""The longest export; 32 billion parameters are 128 GB to read and 64 GB to write."""
COMMAND_S = 30.0

CardOf = Callable[[int], Mapping[str, Any]]
"""What ``node.checkpoints.export`` makes the card of the model of a step of."""


@dataclass(frozen=True, slots=True)
class ModelExports:
    """Makes Hugging Face models of one run's checkpoints, on the hosts that have them."""

    hosts: Mapping[str, tuple[Host, NodeSpec]]
    """The hosts that answer, by node; they are connected and have our code."""
    addresses: Mapping[str, PeerAddress]
    """The address at which the other hosts reach each of them, by node."""
    card_of: CardOf
    secrets: RunSecrets

    async def make(self, checkpoint: FoundCheckpoint, *, merge: bool = False) -> ExportRecord:
        """Make the model of a checkpoint, unless it is there; ``merge`` an adapter into its model.

        Raises:
            ProcessError: it cannot be made; the message says why.
            HostError: a host does not answer.
        """
        began = time.monotonic()
        node = checkpoint.nodes[0]
        host, spec = self.hosts[node]
        out = f"{host.run_dir}/export/{checkpoint.name}{MERGED * merge}"
        made = await _size(host, out)
        if made is None:
            trained = json.loads(await host.transport.get(f"{host.run_dir}/trainer.json"))
            order = {
                "checkpoint": directory_of(host, checkpoint.name),
                "model_dir": trained["model_dir"],
                "dtype": trained["dtype"],
                "merge": merge,
                "out": out,
                "card": dict(self.card_of(checkpoint.step)),
                "credentials": credentials_of(host, self.secrets),
            }
            async with given_by(
                self.hosts, self.addresses, checkpoint.name, self.secrets, needed_on=node
            ) as urls:
                made = await _export(host, spec, {**order, "urls": list(urls)})
        return ExportRecord(
            step=checkpoint.step,
            node=node,
            path=out,
            at=time.time(),
            bytes=made,
            seconds=time.monotonic() - began,
            score=checkpoint.score,
        )


async def _size(host: Host, directory: str) -> int | None:
    """Bytes of a model that is there; None if it is not."""
    done = await host.transport.run(["du", "-sb", directory], timeout_s=COMMAND_S)
    return None if done.exit_code else int(done.stdout.splitlines()[-1].split()[0])


async def _export(host: Host, spec: NodeSpec, order: Mapping[str, object]) -> int:
    stream = await host.transport.open_stream(
        host.module_argv("libra_cli.node.checkpoints.export", spec.env)
    )
    try:
        await stream.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(EXPORT_S):
            answer = await answer_of(stream)
    except TimeoutError:
        answer = {"error": f"not made within {EXPORT_S:.0f} s"}
    finally:
        await stream.close()
    if "bytes" not in answer:
        why = answer.get("error") or stream.errors.rpartition("\n")[2] or "it ended"
        raise ProcessError(f"{host.name}: {order['out']} was not made: {why}")
    return int(answer["bytes"])


async def fetch_model(host: Host, directory: str, to: Path) -> None:
    """Copy a directory of plain files from a host to the controller; each appears whole.

    Raises:
        HostError: the host does not answer, or a file cannot be read or written.
    """
    names = await names_in(host.transport, directory)
    await asyncio.to_thread(to.mkdir, parents=True, exist_ok=True)
    for name in names:
        draft = to / f".{name}.part"
        try:
            await host.transport.fetch(f"{directory}/{name}", draft)
            await asyncio.to_thread(draft.replace, to / name)
        finally:
            draft.unlink(missing_ok=True)
