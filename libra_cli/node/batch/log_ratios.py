"""The log-ratio of each trained token: what the trainer's model says of it, before the first update
of a step, less what the rollout policy said when it sampled it, in nats.

Its exponential is the ratio of the two probabilities, which says how far off-policy the token is.
Each rank computes those of its own micro-batches, each gradient worker those of its share. Several
updates a batch find the same ones, because the proximal policy is the same for all of them.

They are kept and sent as float16, 2 bytes a token, which hold every multiple of 1/128 nat up to 16.
To these they are rounded: a ratio is then right to 0.4 %, enough to tell tokens apart by it, and
the many ratios next to 1 are alike, so that the file that keeps them compresses well. Finer
differences are those of the number format of servers and trainer, whose mean is a metric of every
step (``logprob_gap``). On the wire they are msgpack::

    {"branches": int64 [4 B], of each branch its group, member, number and tokens,
     "values": float16 [sum of tokens], all little-endian}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from libra_cli.node.batch.samples import TokenSample

BranchLogRatios: TypeAlias = dict[tuple[int, int, int], NDArray[np.float16]]
"""Log-ratios of the generated tokens of branches in nats, by group, member and branch."""


PER_NAT = 128
"""Steps of a nat that log-ratios are rounded to; chosen."""


def rounded(log_ratios: NDArray[np.float32]) -> NDArray[np.float16]:
    """Round log-ratios to multiples of 1/128 nat, as they are kept and sent."""
    with np.errstate(over="ignore"):  # an infinite one stays so, and one over 65,504 becomes so
        steps = np.round(log_ratios * PER_NAT) / PER_NAT
        return (steps + 0.0).astype(np.float16)  # there is no -0, which would be another pattern


def pack_log_ratios(found: Mapping[tuple[int, int, int], NDArray[np.float16]]) -> bytes:
    """Encode the log-ratios of branches, by (group, member, branch), in the form above."""
    branches = [(*key, len(values)) for key, values in found.items()]
    return bytes(
        msgpack.packb(
            {
                "branches": np.asarray(branches, dtype="<i8").tobytes(),
                "values": b"".join(values.astype("<f2").tobytes() for values in found.values()),
            }
        )
    )


def read_log_ratios(data: bytes) -> BranchLogRatios:
    """Decode what ``pack_log_ratios`` made.

    Raises:
        ValueError: the branches do not add up to the values.
    """
    message = msgpack.unpackb(data)
    branches = np.frombuffer(message["branches"], dtype="<i8").reshape(-1, 4)
    values = np.frombuffer(message["values"], dtype="<f2")
    if branches[:, 3].min(initial=0) < 0 or branches[:, 3].sum() != len(values):
        raise ValueError(f"{len(values)} log-ratios are not those of {len(branches)} branches")
    parts = np.split(values, np.cumsum(branches[:, 3])[:-1]) if len(branches) else []
    return {
        (int(group), int(member), int(number)): part
        for (group, member, number, _), part in zip(branches, parts, strict=True)
    }


def of_all_generated(
    given: Sequence[TokenSample], kept: Sequence[TokenSample], found: BranchLogRatios
) -> BranchLogRatios:
    """The log ratios of generated tokens, NaN for tokens that were left out of the loss.

    ``found`` has those of the tokens that count in ``kept``, the same samples as ``given``. What a
    gradient worker has counted otherwise is left out.
    """
    whole: BranchLogRatios = {}
    for before, after in zip(given, kept, strict=True):
        values = found.get(after.key)
        if values is None or len(values) != after.generated:
            continue
        places: NDArray[np.float16] = np.full(len(before.token_ids), np.nan, dtype=np.float16)
        places[after.loss_mask == 1] = values
        whole[before.key] = places[before.loss_mask == 1]
    return whole
