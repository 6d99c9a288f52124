"""Which GPUs of a run a host has lost since the run began: they fell off the bus, or must be reset.

A GPU that is lost is left out of nvidia-smi's numbers, so that those behind it get other ones. So
the names that a run gives its processes are UUIDs, and stay those of its beginning. nvidia-smi then
lists the others, or prints one sentence with the place of the lost one on the bus and no listing,
or, where it was the only one, that there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from libra_cli.core.preflight.host_report import NodeFacts

NONE_LEFT = "No devices were found"


class RunGpu(NamedTuple):
    """A GPU as its host named it when the run began."""

    name: str
    """What CUDA_VISIBLE_DEVICES calls it: its UUID, else nvidia-smi's index."""
    bus: str
    """The place on the PCI bus, such as ``00000000:3B:00.0``; empty where nobody told."""


def gpus_of_run(facts: NodeFacts, count: int) -> tuple[RunGpu, ...]:
    """Return the first ``count`` GPUs that a run may use there, which are its own."""
    return tuple(RunGpu(gpu.uuid or gpu.device, gpu.bus) for gpu in facts.gpus[:count])


def lost_since(gpus: Sequence[RunGpu], now: NodeFacts) -> Iterator[int]:
    """Yield the places among ``gpus`` of those that the host does not have ``now``.

    Of a host that gives no listing, for another reason, nothing is known.
    """
    for number, gpu in enumerate(gpus):
        if now.gpus_present or not now.gpus_error:
            lost = not gpu.name.isdigit() and gpu.name not in now.gpus_present
        else:
            place = gpu.bus.partition(":")[2]  # sentences have a domain of four digits, or none
            named = bool(place) and place.upper() in now.gpus_error.upper()
            lost = named or NONE_LEFT in now.gpus_error
        if lost:
            yield number
