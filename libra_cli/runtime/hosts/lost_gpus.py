"""Asks hosts whether the GPUs of a process that has failed are still there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from libra_cli.config.errors import LibraError
from libra_cli.core.launch.process import VISIBLE, ProcessSpec
from libra_cli.core.preflight.lost_gpus import lost_since
from libra_cli.core.types import LostGpu
from libra_cli.runtime.hosts.cluster import Cluster


async def lost_gpus(cluster: Cluster, processes: Iterable[ProcessSpec]) -> tuple[LostGpu, ...]:
    """Return the GPUs of these processes that their hosts have lost since the run began.

    Of a host that does not answer nothing is known.
    """
    names = {process.node: process.env.get(VISIBLE, "").split(",") for process in processes}
    found = await asyncio.gather(*(_lost_on(cluster, node, set(names[node])) for node in names))
    return tuple(gpu for some in found for gpu in some)


async def _lost_on(cluster: Cluster, node: str, names: set[str]) -> list[LostGpu]:
    gpus = cluster.gpus.get(node, ())
    if node not in cluster.reached or names.isdisjoint(gpu.name for gpu in gpus):
        return []
    with suppress(LibraError):
        numbers = lost_since(gpus, await cluster.hosts[node].facts())
        return [LostGpu(node, n, gpus[n].name) for n in numbers if gpus[n].name in names]
    return []
