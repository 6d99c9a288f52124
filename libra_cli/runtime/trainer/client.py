"""The HTTP side of the trainer's first rank: ready, train, checkpoint.

A step is handed over once and then asked for until it is done; both requests may be repeated, so a
connection that drops in between loses nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from libra_cli.runtime.supervision.answers import finite, numbers_by_name, reads_answers
from libra_cli.runtime.supervision.failures import MOST_CHARACTERS
from libra_cli.runtime.trainer.connection import NotSaved, Unreachable
from libra_cli.runtime.trainer.rank_client import CALL_TIMEOUT_S, POLL_S, RankClient

RETRY_S = 0.5
LONG_POLL_S = 20
CHECKPOINT_TIMEOUT_S = 1800.0
LOG_RATIOS_TIMEOUT_S = 20.0
"""Without a byte; a step waits no longer for what is only shown."""

_log = logging.getLogger(__name__)


class TrainerClient(RankClient):
    """The trainer, seen from the controller."""

    who = "trainer"

    async def _persist(
        self, ask: Callable[[], Awaitable[dict[str, Any]]], *, patience_s: float
    ) -> dict[str, Any]:
        """Repeat a request while the connection is down, but not for ever."""
        give_up = time.monotonic() + patience_s
        while True:
            try:
                return await ask()
            except Unreachable:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(RETRY_S)

    @reads_answers(TrainerError)
    async def wait_ready(self, *, timeout_s: float) -> PublishedVersion:
        """Every rank is there; returns the version it starts from, published.

        Raises:
            TrainerError: a rank failed, or not ready in time.
        """
        health = await self._ready(timeout_s=timeout_s)
        return self._published(health["published"])

    @reads_answers(TrainerError)
    async def train(
        self, action: Train, shares: Sequence[Mapping[str, object]], *, patience_s: float
    ) -> StepDone:
        """Hand over a batch and wait for its step.

        Raises:
            TrainerError: the step failed, or the trainer was out of reach for ``patience_s``.
        """
        body = pack_batch(action, shares)
        result = f"/train/{action.step}"
        answer = await self._hand_over("/train", body, result, patience_s=patience_s)
        found = dict(answer["metrics"])
        done = tuple(_share_done(row, action.shares) for row in found.pop("shares", ()))
        advantages = tuple(map(_advantages_of, found.pop("advantages", ())))
        metrics = numbers_by_name(found)
        log_ratios = await self._log_ratios(action.step)
        return StepDone(self.incarnation, action.step, None, metrics, done, log_ratios, advantages)

    async def _log_ratios(self, step: int) -> LogRatios | None:
        """The log ratios of a step that is done; None if they cannot be read."""
        try:
            return await self._read_log_ratios(step)
        except TrainerError as error:
            _log.warning("step %d is shown without ratios: %s", step, error)
            return None

    @reads_answers(TrainerError)
    async def _read_log_ratios(self, step: int) -> LogRatios:
        path = f"/log-ratios/{step}"
        answer = msgpack.unpackb(await self._bytes("GET", path, timeout_s=LOG_RATIOS_TIMEOUT_S))
        branches, values = array("q", answer["branches"]), array("H", answer["values"])
        if len(branches) % 4 or sum(branches[3::4]) != len(values) or min(branches, default=0) < 0:
            raise ValueError(f"{len(values)} log-ratios are not those of its branches")
        return LogRatios(branches, values)

    @reads_answers(TrainerError)
    async def wait_published(self, step: int, *, patience_s: float) -> PublishedVersion:
        """The version of a step that is done, once it is complete.

        Raises:
            TrainerError: it could not be written, or the trainer was out of reach.
        """
        answer = await self._until_done(f"/versions/{step}", patience_s=patience_s)
        return self._published(answer["version"])

    @reads_answers(TrainerError)
    async def accumulate(self, action: Accumulate, *, patience_s: float) -> Accumulated:
        """Hand over a part of a batch and wait until its gradients are in.

        Raises:
            TrainerError: it failed, or the trainer was out of reach for ``patience_s``.
        """
        result = f"/accumulate/{action.step}/{action.part}"
        body = pack_part(action)
        await self._hand_over("/accumulate", body, result, patience_s=patience_s)
        return Accumulated(self.incarnation, action.step, action.part)

    async def _hand_over(
        self, path: str, body: bytes, result: str, *, patience_s: float
    ) -> dict[str, Any]:
        async def give() -> dict[str, Any]:
            return await self._call("POST", path, body, timeout_s=CALL_TIMEOUT_S)

        await self._persist(give, patience_s=patience_s)
        return await self._until_done(result, patience_s=patience_s)

    async def _until_done(self, result: str, *, patience_s: float) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            asked = f"{result}?wait_s={LONG_POLL_S}"
            return await self._call("GET", asked, timeout_s=CALL_TIMEOUT_S)

        while True:
            answer = await self._persist(ask, patience_s=patience_s)
            if answer["state"] == "failed":
                raise TrainerError(f"{result[1:]}: {answer['error']}")
            if answer["state"] == "done":
                return answer
            _check_runs(answer, result)

    @reads_answers(TrainerError)
    async def wait_checkpoint(self, step: int, *, patience_s: float) -> str:
        """The path of the checkpoint that was asked for with a step, when it is written."""

        async def ask() -> dict[str, Any]:
            return await self._call("GET", f"/train/{step}", timeout_s=CALL_TIMEOUT_S)

        while True:
            answer = await self._persist(ask, patience_s=patience_s)
            if answer["state"] == "failed":
                raise TrainerError(f"checkpoint of step {step}: {answer['error']}")
            if answer.get("checkpoint"):
                return str(answer["checkpoint"])
            if answer.get("checkpoint_error"):
                raise NotSaved(str(answer["checkpoint_error"]))
            _check_runs(answer, f"checkpoint of step {step}")
            await asyncio.sleep(POLL_S)

    @reads_answers(TrainerError)
    async def checkpoint(self, ledger: dict[str, Any]) -> str:
        """Write a checkpoint now; returns its path on the trainer's host."""
        body = json.dumps({"ledger": ledger}).encode()
        timeout_s = CHECKPOINT_TIMEOUT_S
        answer = await self._call("POST", "/checkpoint", body, timeout_s=timeout_s)
        if answer.get("error"):
            raise NotSaved(str(answer["error"]))
        return str(answer["path"])

    def _published(self, answer: dict[str, Any]) -> PublishedVersion:
        return PublishedVersion(
            version=WeightVersion(self.incarnation, int(answer["version"])),
            bytes=int(answer["bytes"]),
            at=finite(answer["published_at"]),
        )


def _check_runs(answer: Mapping[str, Any], what: str) -> None:
    """Refuse a state that there is not, which nobody would wait the end of."""
    if answer["state"] not in ("running", "done"):
        raise TrainerError(f"{what}: the trainer says {str(answer['state'])[:80]!r}")


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


def pack_part(action: Accumulate) -> bytes:
    """The wire form of a part of a batch."""
    samples = [pack_sample(sample) for sample in action.samples]
    part = {"step": action.step, "part": action.part, "trajectories": samples}
    return bytes(msgpack.packb(part))


def pack_batch(action: Train, shares: Sequence[Mapping[str, object]] = ()) -> bytes:
    """The wire form of a batch: msgpack, token arrays as little-endian bytes."""
    return bytes(
        msgpack.packb(
            {
                "step": action.step,
                "checkpoint": None if action.ledger is None else {"ledger": action.ledger},
                "trajectories": [pack_sample(sample) for sample in action.samples],
                "parts": action.parts,
                "shares": list(shares),
            }
        )
    )


def pack_sample(sample: TrainSample) -> dict[str, Any]:
    """The wire form of one branch of a trajectory."""
    trajectory, tokens, by_token = sample.trajectory, sample.tokens, sample.token_advantages
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
    """From which token on it is how many versions behind: an entry for each change."""
    changes = [[0, 0]]
    for behind, start, _ in sample.tokens.behind(sample.held):
        if behind != changes[-1][1]:
            changes.append([start, behind])
    return changes[1:]
