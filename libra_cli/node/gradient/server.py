"""The HTTP server from which the trainer's ranks read the gradients of a worker's share.

    GET /share?incarnation=&step=&version=&have=0&wait_s=0
        {"state": awaited | running | done | failed, "error", "tensors": {name: shape} so far,
         "sums", "tokens", "seconds" when done}; waits at most wait_s for more than ``have`` tensors
    GET /gradient?incarnation=&step=&version=&tensor=&start=&stop=
        rows [start, stop) in little-endian numbers of ``training.worker_gradients``
    GET /log-ratios?incarnation=&step=&version=
        those of the share's tokens, when it is done (``node.batch.log_ratios``)

A share of a later step, or of a later trainer, may be on its way and is awaited. A request for any
other incarnation, step or version than the one in the store is answered with 409, for a tensor that
is not finished with 404. It talks to hosts of the run alone (mutual TLS), so that nothing is read
or changed on the way, and every route demands the run's bearer token. ``GradientStore`` is the
object that the computing thread and the HTTP threads share. Needs no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from libra_cli.node.credentials import Credentials
from libra_cli.node.http import Answer, Blob, HostServer, JsonHandler, Reply, refusal, serve_hosts

MAX_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A file that holds rows ``[start, stop)`` of a gradient as little-endian numbers."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FinishedGradient:
    """The complete gradient of one tensor; its pieces are in order and leave nothing out."""

    shape: tuple[int, ...]
    pieces: Sequence[Piece]
    number_bytes: int = 4

    def read(self, first: int, last: int) -> bytes:
        """Read rows ``[first, last)`` as little-endian numbers.

        Raises:
            ValueError: the tensor has no such rows.
            FileNotFoundError: the next share has removed the files.
        """
        rows = self.pieces[-1].stop
        if not 0 <= first <= last <= rows:
            raise ValueError(f"rows {first} to {last} of {rows}")
        width = self.number_bytes
        for size in self.shape[1:]:
            width *= size
        found = []
        for piece in self.pieces:
            low, high = max(first, piece.start), min(last, piece.stop)
            if low < high:
                with piece.path.open("rb") as file:
                    file.seek((low - piece.start) * width)
                    found.append(file.read((high - low) * width))
        return b"".join(found)


@dataclass(slots=True)
class GradientStore:
    """The gradients of the share that is computed, or of the last one."""

    incarnation: int
    """Number of the slot's assignment to this worker."""
    step: int = 0
    version: str = ""
    state: str = "failed"
    """``running | done | failed``"""
    error: str = "no share yet"
    _finished: dict[str, FinishedGradient] = field(default_factory=dict)
    _result: dict[str, Any] = field(default_factory=dict)
    _log_ratios: bytes = b""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # The computing side.

    def begin(self, step: int, version: str) -> None:
        """Begin a share; nothing of the one before is served any more."""
        with self._changed:
            self.step, self.version, self.state, self.error = step, version, "running", ""
            self._finished, self._result, self._log_ratios = {}, {}, b""
            self._changed.notify_all()

    def finish(self, name: str, tensor: FinishedGradient) -> None:
        """Offer the complete gradient of a tensor to whoever waits for it."""
        with self._changed:
            self._finished[name] = tensor
            self._changed.notify_all()

    def done(
        self,
        step: int,
        sums: Mapping[str, float],
        tokens: int,
        seconds: float,
        log_ratios: bytes,
    ) -> None:
        """Mark the share as done, unless it was dropped.

        ``sums`` are over the share's generated tokens, by name; ``tokens`` counts those, of which
        ``log_ratios`` are, as ``node.batch.log_ratios`` packs them.
        """
        with self._changed:
            if self.state == "running" and self.step == step:
                self.state, self._log_ratios = "done", log_ratios
                self._result = {"sums": dict(sums), "tokens": tokens, "seconds": seconds}
            self._changed.notify_all()

    def drop(self, step: int, reason: str) -> None:
        """Mark the share of this step as failed: nobody wants it, or it cannot be computed."""
        with self._changed:
            if step == self.step:
                self.state, self.error = "failed", reason
            self._changed.notify_all()

    def wanted(self) -> bool:
        """Tell whether the share is still to be computed."""
        with self._changed:
            return self.state == "running"

    def has(self, step: int, version: str) -> bool:
        """Tell whether this share was taken and not dropped since."""
        with self._changed:
            taken = (step, version) == (self.step, self.version)
            return taken and self.state != "failed"

    # The answering side.

    def share(self, about: Mapping[str, str], have: int, wait_s: float) -> Answer:
        """Answer how far the share is, after at most ``wait_s`` (no more than ``MAX_WAIT_S``).

        It waits for more than ``have`` finished tensors, or for the end of the share.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_news(about, have), min(wait_s, MAX_WAIT_S))
            if self._is_awaited(about):
                return HTTPStatus.OK, {"state": "awaited", "error": "", "tensors": {}}
            if other := self._other(about):
                return other
            return HTTPStatus.OK, {
                "state": self.state,
                "error": self.error,
                "tensors": {name: list(one.shape) for name, one in self._finished.items()},
                **self._result,
            }

    def _has_news(self, about: Mapping[str, str], have: int) -> bool:
        if self._is_awaited(about):
            return False
        going_on = self._other(about) is None and self.state == "running"
        return not going_on or len(self._finished) > have

    def _is_awaited(self, about: Mapping[str, str]) -> bool:
        """The trainer hears of a share a moment before the worker has taken it."""
        if int(about["incarnation"]) != self.incarnation:
            return False
        # One that was started again goes back to the step of its checkpoint.
        asked = _trainer_of(about["version"]), int(about["step"])
        return asked > (_trainer_of(self.version), self.step)

    def gradient(self, about: Mapping[str, str], name: str, first: int, last: int) -> Reply:
        """Answer rows ``[first, last)`` of a finished tensor."""
        with self._changed:
            if other := self._other(about):
                return other
            tensor = self._finished.get(name)
        if tensor is None:
            return refusal(HTTPStatus.NOT_FOUND, f"{name} is not finished")
        try:
            data = tensor.read(first, last)
        except FileNotFoundError:
            return refusal(HTTPStatus.CONFLICT, "the next share came while this was read")
        return HTTPStatus.OK, Blob(data)

    def log_ratios(self, about: Mapping[str, str]) -> Reply:
        """Answer ``GET /log-ratios`` with the packed log-ratios of the share's tokens."""
        with self._changed:
            if other := self._other(about):
                return other
            if self.state != "done":
                return refusal(HTTPStatus.NOT_FOUND, f"the share is {self.state}")
            return HTTPStatus.OK, Blob(self._log_ratios)

    def _other(self, about: Mapping[str, str]) -> Answer | None:
        asked = int(about["incarnation"]), int(about["step"]), about["version"]
        here = self.incarnation, self.step, self.version
        if asked == here:
            return None
        return refusal(
            HTTPStatus.CONFLICT,
            f"incarnation {asked[0]}, step {asked[1]}, version {asked[2]} was asked for, here is "
            f"incarnation {here[0]}, step {here[1]}, version {here[2] or 'none'}",
        )


def _trainer_of(version: str) -> int:
    """The incarnation of the trainer that published a version; -1 where its name tells none."""
    _, mark, number = version.rpartition("-e")
    return int(number) if mark and number.isdecimal() else -1


def serve(store: GradientStore, *, bind: str, port: int, credentials: Credentials) -> HostServer:
    """Start a server of this store in threads of its own, and return it; ``shutdown`` ends it."""
    return serve_hosts(
        _GradientHandler,
        bind=bind,
        port=port,
        credentials=credentials,
        is_reserved=port > 0,
        store=store,
    )


class _GradientHandler(JsonHandler):
    store: GradientStore

    def get(self, path: str, query: Mapping[str, str]) -> Reply:
        match path:
            case "/share":
                have, wait_s = int(query.get("have", "0")), float(query.get("wait_s", "0"))
                return self.store.share(query, have, wait_s)
            case "/gradient":
                first, last = int(query["start"]), int(query["stop"])
                return self.store.gradient(query, query["tensor"], first, last)
            case "/log-ratios":
                return self.store.log_ratios(query)
            case _:
                return self.no_route(path)
