"""Shares of a step, which gradient workers compute in place of the trainer.

``POST /train`` names a share by its trajectories. The trainer is given them all the same, so that
it can compute any share itself. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from libra_cli.config.errors import TrainerError
from libra_cli.node.batch.samples import TokenSample


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The trajectories of one step that a gradient worker was given."""

    worker: str
    """The slot of the gradient worker."""
    incarnation: int
    """Number of the slot's assignment as a gradient worker."""
    url: str
    """URL of the worker's gradient server, ``https://address:port#name``; the name is that in its
    host's certificate."""
    version: str
    """Name of the weight version that the worker computes with."""
    trajectories: frozenset[tuple[int, int]]
    """Pairs of a group and a member of it."""


def read_shares(
    messages: Sequence[Mapping[str, Any]], samples: Sequence[TokenSample]
) -> tuple[WorkerShare, ...]:
    """Decode the ``shares`` of ``POST /train``.

    Raises:
        TrainerError: a share names a trajectory that is not in the message or that another share
            has, or its URL has another form.
    """
    shares = tuple(
        WorkerShare(
            worker=str(message["worker"]),
            incarnation=int(message["incarnation"]),
            url=str(message["url"]),
            version=str(message["version"]),
            trajectories=frozenset(
                (int(group), int(member)) for group, member in message["trajectories"]
            ),
        )
        for message in messages
    )
    free = {sample.trajectory for sample in samples}
    for share in shares:
        _check_url(share)
        if missing := sorted(share.trajectories - free):
            raise TrainerError(
                f"the share of {share.worker} names trajectory {missing[0]}, which is not in the "
                "message, or is in another share"
            )
        free -= share.trajectories
    return shares


def _check_url(share: WorkerShare) -> None:
    url = urlsplit(share.url)
    if url.scheme != "https" or not url.hostname or not url.port or not url.fragment:
        raise TrainerError(
            f"the share of {share.worker} is at {share.url!r}: no https://address:port#name"
        )


def rows_of(rows: int, *, rank: int, world: int) -> tuple[int, int]:
    """Return ``[start, stop)`` of a rank's rows, cut as ``torch.chunk`` and FSDP2 cut axis 0."""
    size = -(-rows // world)
    return min(rank * size, rows), min((rank + 1) * size, rows)
