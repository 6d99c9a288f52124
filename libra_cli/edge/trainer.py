"""The HTTP side of the trainer's first rank: ready, train, checkpoint.

A step is handed over once and then asked for until it is done; both requests may be repeated, so a
connection that drops in between loses nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgpack

from libra_cli.core.actions import Sample, Train
from libra_cli.core.events import Published, StepDone
from libra_cli.edge.http import describe, open_session
from libra_cli.edge.transport import Endpoint
from libra_cli.errors import TrainerError

POLL_S = 0.25
RETRY_S = 0.5
LONG_POLL_S = 20
CALL_TIMEOUT_S = 120.0
CHECKPOINT_TIMEOUT_S = 1800.0


class Unreachable(TrainerError):
    """No answer came; the request may be repeated."""


class Trainer:
    """The trainer, seen from the controller."""

    def __init__(self, epoch: int, endpoint: Endpoint, token: str) -> None:
        self.epoch = epoch
        self._session = open_session(endpoint, token)

    async def close(self) -> None:
        """Drop the connections; the trainer itself is not touched."""
        await self._session.close()

    async def _call(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        if self._session.closed:
            raise TrainerError("the trainer is being stopped")
        deadline = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, path, data=body, timeout=deadline) as reply:
                raw = await reply.read()
                status = reply.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"trainer: {path}: {describe(error)}") from error
        answer: dict[str, Any] = json.loads(raw) if raw[:1] == b"{" else {}
        if status >= 400:
            detail = answer.get("error") or raw[:300].decode(errors="replace")
            raise TrainerError(f"trainer: {path} answered {status}: {detail}")
        return answer

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

    async def wait_ready(self, *, timeout_s: float) -> Published:
        """Every rank is there; returns the version it starts from, published.

        Raises:
            TrainerError: a rank failed, or not ready in time.
        """
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            try:
                health = await self._call("GET", "/health", timeout_s=CALL_TIMEOUT_S)
            except Unreachable:
                health = {"state": "starting"}
            if health["state"] == "failed":
                raise TrainerError(str(health.get("error")))
            if health["state"] == "ready":
                return self._published(health["published"])
            await asyncio.sleep(POLL_S)
        raise TrainerError(f"not ready after {timeout_s:.0f} s")

    async def train(self, action: Train, *, patience_s: float) -> StepDone:
        """Hand over a batch and wait for its step.

        Raises:
            TrainerError: the step failed, or the trainer was out of reach for ``patience_s``.
        """
        body = pack_batch(action)

        async def hand_over() -> dict[str, Any]:
            return await self._call("POST", "/train", body, timeout_s=CALL_TIMEOUT_S)

        async def ask() -> dict[str, Any]:
            path = f"/train/{action.step}?wait_s={LONG_POLL_S}"
            return await self._call("GET", path, timeout_s=CALL_TIMEOUT_S)

        await self._persist(hand_over, patience_s=patience_s)
        while True:
            answer = await self._persist(ask, patience_s=patience_s)
            if answer["state"] == "failed":
                raise TrainerError(f"step {action.step}: {answer['error']}")
            if answer["state"] == "done":
                published = self._published(answer["version"])
                return StepDone(self.epoch, action.step, published, answer["metrics"])

    async def wait_checkpoint(self, step: int, *, patience_s: float) -> str:
        """The path of the checkpoint that was asked for with a step, when it is written."""

        async def ask() -> dict[str, Any]:
            return await self._call("GET", f"/train/{step}", timeout_s=CALL_TIMEOUT_S)

        while True:
            answer = await self._persist(ask, patience_s=patience_s)
            if answer["state"] == "failed":
                raise TrainerError(f"checkpoint of step {step}: {answer['error']}")
            if answer["checkpoint"]:
                return str(answer["checkpoint"])
            await asyncio.sleep(POLL_S)

    async def checkpoint(self, ledger: dict[str, Any]) -> str:
        """Write a checkpoint now; returns its path on the trainer's host."""
        body = json.dumps({"ledger": ledger}).encode()
        timeout_s = CHECKPOINT_TIMEOUT_S
        answer = await self._call("POST", "/checkpoint", body, timeout_s=timeout_s)
        return str(answer["path"])

    async def stop(self) -> None:
        """Ask every rank to leave; the agent makes sure that they do."""
        await self._call("POST", "/stop", timeout_s=5.0)

    def _published(self, answer: dict[str, Any]) -> Published:
        return Published(
            version=int(answer["version"]),
            trainer_epoch=self.epoch,
            name=str(answer["name"]),
            bytes=int(answer["bytes"]),
            at=float(answer["published_at"]),
        )


def pack_batch(action: Train) -> bytes:
    """The wire form of a batch: msgpack, token arrays as little-endian bytes."""
    return bytes(
        msgpack.packb(
            {
                "step": action.step,
                "checkpoint": None if action.ledger is None else {"ledger": action.ledger},
                "trajectories": [_pack_sample(sample) for sample in action.samples],
            }
        )
    )


def _pack_sample(sample: Sample) -> dict[str, Any]:
    trajectory = sample.trajectory
    return {
        "group": trajectory.id.group,
        "member": trajectory.id.member,
        "token_ids": trajectory.token_ids.tobytes(),
        "logprobs": trajectory.logprobs.tobytes(),
        "loss_mask": trajectory.loss_mask.tobytes(),
        "reward": trajectory.reward,
        "fresh": int(sample.fresh),
        "staleness": sample.staleness,
    }
