"""The controller's side of the trainer's first rank: ready, train, checkpoint.

An order is handed over, and then what comes of it is asked for; both may be repeated
(``libra_cli.node.trainer.commands``), so a connection that drops in between loses nothing.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from libra_cli.config.errors import TrainerError
from libra_cli.config.text import one_line
from libra_cli.core.actions import Accumulate, BatchPartition, Train, TrainSample
from libra_cli.core.events import (
    Accumulated,
    PublishedVersion,
    ShareDone,
    StepDone,
    TurnAdvantages,
)
from libra_cli.core.types import ChosenExperts, LogRatios, WeightVersion
from libra_cli.runtime.processes.stream import Answer
from libra_cli.runtime.supervision.answers import finite, numbers_by_name, reads_answers
from libra_cli.runtime.supervision.failures import MOST_CHARACTERS
from libra_cli.runtime.trainer.connection import NO_IMAGES, ImagesOf, NotSaved
from libra_cli.runtime.trainer.rank_client import RankClient

LOG_RATIOS_TIMEOUT_S = 20.0
"""A step waits no longer for what is only shown."""

_log = logging.getLogger(__name__)


class TrainerClient(RankClient):
    """Gives the orders of the controller to the trainer's rank 0."""

    who = "trainer"

    @reads_answers(TrainerError)
    async def wait_ready(self, *, timeout_s: float) -> PublishedVersion:
        """Wait until every rank is there, and return the published version that it starts from.

        Raises:
            TrainerError: a rank failed, or not ready in time.
        """
        return self._published((await self._ready(timeout_s=timeout_s))["published"])

    @reads_answers(TrainerError)
    async def train(
        self,
        action: Train,
        shares: Sequence[Mapping[str, object]],
        *,
        patience_s: float,
        images: ImagesOf = NO_IMAGES,
    ) -> StepDone:
        """Hand over a batch and wait for its step.

        Raises:
            TrainerError: the step failed, or the trainer was out of reach for ``patience_s``.
        """
        step = action.step
        order = batch_order(action, shares, images)
        await self._persist("train", order, patience_s=patience_s)
        found = dict(
            (await self._persist("done", {"step": step}, patience_s=patience_s))["metrics"]
        )
        done = tuple(_share_done(row, action.shares) for row in found.pop("shares", ()))
        advantages = tuple(map(_advantages_of, found.pop("advantages", ())))
        metrics = numbers_by_name(found)
        log_ratios = await self._log_ratios(step)
        return StepDone(self.incarnation, step, None, metrics, done, log_ratios, advantages)

    async def _log_ratios(self, step: int) -> LogRatios | None:
        """The log ratios of a step that is done; None if they cannot be read."""
        try:
            return await self._read_log_ratios(step)
        except TrainerError as error:
            _log.warning("step %d is shown without ratios: %s", step, error)
            return None

    @reads_answers(TrainerError)
    async def _read_log_ratios(self, step: int) -> LogRatios:
        answer = await self._call("log_ratios", {"step": step}, timeout_s=LOG_RATIOS_TIMEOUT_S)
        told = msgpack.unpackb(answer["packed"])
        branches, values = array("q", told["branches"]), array("H", told["values"])
        if len(branches) % 4 or sum(branches[3::4]) != len(values) or min(branches, default=0) < 0:
            raise ValueError(f"{len(values)} log-ratios are not those of its branches")
        return LogRatios(branches, values)

    @reads_answers(TrainerError)
    async def wait_published(self, step: int, *, patience_s: float) -> PublishedVersion:
        """The version of a step that is done, once it is complete.

        Raises:
            TrainerError: it could not be written, or the trainer was out of reach.
        """
        return self._published(
            await self._persist("published", {"step": step}, patience_s=patience_s)
        )

    @reads_answers(TrainerError)
    async def accumulate(
        self, action: Accumulate, *, patience_s: float, images: ImagesOf = NO_IMAGES
    ) -> Accumulated:
        """Hand over a part of a batch and wait until its gradients are in.

        Raises:
            TrainerError: it failed, or the trainer was out of reach for ``patience_s``.
        """
        part = {"step": action.step, "part": action.part}
        order = part | {"trajectories": [pack_sample(one, images) for one in action.samples]}
        await self._persist("accumulate", order, patience_s=patience_s)
        await self._persist("accumulated", part, patience_s=patience_s)
        return Accumulated(self.incarnation, action.step, action.part)

    @reads_answers(TrainerError)
    async def wait_checkpoint(self, step: int, *, patience_s: float) -> str:
        """The path of the checkpoint that was asked for with a step, when it is written."""
        return _path_of(await self._persist("saved", {"step": step}, patience_s=patience_s))

    @reads_answers(TrainerError)
    async def checkpoint(self, ledger: dict[str, Any], *, patience_s: float) -> str:
        """Write a checkpoint now; returns its path on the trainer's host."""
        order = {"ledger": ledger, "id": secrets.token_hex(8)}
        return _path_of(await self._persist("checkpoint", order, patience_s=patience_s))

    def _published(self, answer: Answer) -> PublishedVersion:
        return PublishedVersion(
            version=WeightVersion(self.incarnation, int(answer["version"])),
            bytes=int(answer["bytes"]),
            at=finite(answer["published_at"]),
        )


def _path_of(answer: Answer) -> str:
    """Return the path of a checkpoint that is written; raises NotSaved."""
    if "error" in answer:
        raise NotSaved(str(answer["error"]))
    return str(answer["path"])


def _advantages_of(row: Sequence[Any]) -> TurnAdvantages:
    group, member, values = row
    return TurnAdvantages(int(group), int(member), tuple(finite(value) for value in values))


def _share_done(row: Mapping[str, Any], shares: Sequence[BatchPartition]) -> ShareDone:
    incarnations = {share.slot: share.incarnation for share in shares}
    slot, seconds = str(row["worker"]), row["seconds"]
    return ShareDone(
        slot=slot,
        incarnation=incarnations[slot],
        used=bool(row["used"]),
        reason=one_line(str(row["reason"])[:MOST_CHARACTERS]),
        tokens=int(row["tokens"]),
        seconds=None if seconds is None else finite(seconds),
        waited_s=finite(row["waited_s"]),
        bytes=int(row["bytes"]),
        transfer_s=finite(row["transfer_s"]),
    )


def batch_order(
    action: Train, shares: Sequence[Mapping[str, object]] = (), images: ImagesOf = NO_IMAGES
) -> dict[str, Any]:
    """The order of a step, token arrays as little-endian bytes."""
    return {
        "step": action.step,
        "checkpoint": None if action.ledger is None else {"ledger": action.ledger},
        "trajectories": [pack_sample(sample, images) for sample in action.samples],
        "parts": action.parts,
        "shares": list(shares),
    }


def pack_sample(sample: TrainSample, images: ImagesOf = NO_IMAGES) -> dict[str, Any]:
    """The wire form of one branch of a trajectory."""
    trajectory, tokens, by_token = sample.trajectory, sample.tokens, sample.token_advantages
    length = len(tokens.token_ids)
    return {
        "group": trajectory.id.group,
        "member": trajectory.id.member,
        "branch": trajectory.number if sample.branch is None else sample.branch,
        "token_ids": tokens.token_ids.tobytes(),
        "logprobs": tokens.logprobs.tobytes(),
        "loss_mask": tokens.loss_mask.tobytes(),
        "reward": trajectory.reward,
        "fresh": int(sample.fresh),
        "behind": _ages(sample),
        "advantages": [list(change) for change in sample.advantages],
        "token_advantages": None if by_token is None else by_token.tobytes(),
        "turns": [list(turn) for turn in sample.turns],
        "routes": _routes(tokens.routes),
        # What is shown after the last turn of a trajectory that is cut is no part of it.
        "images": [list(one) for one in images.get(trajectory.id, ()) if one.start < length],
    }


def _routes(routes: ChosenExperts | None) -> dict[str, Any] | None:
    if routes is None:
        return None
    ids = routes.ids
    return {
        "layers": routes.layers,
        "chosen": routes.chosen,
        "bytes": ids.itemsize,
        "ids": ids.tobytes(),
    }


def _ages(sample: TrainSample) -> list[list[int]]:
    """Return (first token, versions behind) for each change of the tokens' versions."""
    changes = [[0, 0]]
    for behind, start, _ in sample.tokens.behind(sample.held):
        if behind != changes[-1][1]:
            changes.append([start, behind])
    return changes[1:]
