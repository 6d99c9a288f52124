"""The client that fetches a share's gradients from a gradient worker for one rank of the trainer.

A thread asks ``gradient.server`` on the worker which tensors are finished and reads this rank's
rows of them, while the rank computes its own part of the step. The rows lie in buffers of their
own and count only once all have come, so a share is used whole or not at all. The thread retries
after a lost connection and ends when nobody wants the share any more. The rank that waits for it
has a deadline.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from math import isfinite
from typing import Any
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray

from libra_cli.node.batch.log_ratios import BranchLogRatios, read_log_ratios
from libra_cli.node.batch.shares import WorkerShare
from libra_cli.node.credentials import Credentials, PeerConnection
from libra_cli.node.gradient.wire import BYTES, to_float32

POLL_S = 2.0
"""How long the worker may hold back an answer that brings nothing new."""
TIMEOUT_S = 5.0
"""How long to wait for a connection, and for the next bytes of an answer."""
RETRY_S = 0.2
BLOCK_BYTES = 64 * 1024**2
"""The most that one request reads; the worker holds as much in memory for it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``[start, stop)`` of a tensor of this shape. A scalar has one row."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Numbers in one row: the product of all dimensions but the first."""
        return int(np.prod(self.shape[1:], dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Arrival:
    """How the fetching of a share ended on one rank."""

    problem: str
    """Why the share cannot be used; empty if everything this rank needs is there."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums over the share's generated tokens, named as by ``PolicyModel.gradients_of``."""
    seconds: float | None = None
    """Seconds that the worker computed; None if it has not told."""
    bytes: int = 0
    transfer_s: float = 0.0
    waited_s: float = 0.0
    """How long the rank waited after its own part."""


class _Unusable(Exception):
    """The worker's answer says that the share cannot be used."""


class GradientClient:
    """Fetches the gradients of one share for one rank, in a thread."""

    def __init__(
        self,
        share: WorkerShare,
        step: int,
        *,
        tokens: int,
        wanted: Mapping[str, Rows],
        credentials: Credentials,
        dtype: str = "float32",
        log_ratios: bool = False,
    ) -> None:
        """``tokens`` is the number of generated tokens, which the worker must have counted too.

        ``dtype`` is the format in which gradients come; ``log_ratios`` of the tokens, 2 bytes each,
        are fetched by one rank.
        """
        self.share = share
        self._dtype = dtype
        self.rows: dict[str, NDArray[np.float32]] = {}
        """This rank's rows by tensor, ``[rows * width]``; complete if ``settle`` has no problem."""
        self.log_ratios: BranchLogRatios = {}
        """Log-ratios of the share's tokens that count, if wanted; as complete as the rows."""
        self._wants_log_ratios = log_ratios
        self._step = step
        self._tokens = tokens
        self._wanted = wanted
        self._connection = _Connection(share, step, credentials)
        self._answer: dict[str, Any] = {}
        self._bytes = 0
        self._transfer_s = 0.0
        self._problem = ""
        self._trouble = ""
        self._ended_at = 0.0
        self._ended = threading.Event()
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradient-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def settle(self, since: float, patience_s: float) -> Arrival:
        """Wait for the end until ``since + patience_s`` (on ``time.monotonic``), then cancel."""
        if not self._ended.wait(max(0.0, since + patience_s - time.monotonic())):
            self._unwanted.set()
            return Arrival(self._overdue(patience_s), waited_s=time.monotonic() - since)
        return Arrival(
            problem=self._problem,
            sums={} if self._problem else self._answer["sums"],
            seconds=None if self._problem else self._answer["seconds"],
            bytes=self._bytes,
            transfer_s=self._transfer_s,
            waited_s=max(0.0, self._ended_at - since),
        )

    def abandon(self) -> None:
        """Cancel the fetching; the thread ends within ``TIMEOUT_S``."""
        self._unwanted.set()

    def _overdue(self, patience_s: float) -> str:
        state = self._answer.get("state", "no answer yet")
        found = f"not done within {patience_s:.1f} s of the trainer's own part: {state}"
        found += f", {len(self.rows)} of {len(self._wanted)} tensors"
        return f"{found} ({self._trouble})" if self._trouble else found

    def _run(self) -> None:
        try:
            self._fetch()
        except _Unusable as error:
            self._problem = str(error)
        except Exception as error:  # noqa: BLE001  the trainer computes the share instead
            self._problem = f"cannot be read: {error!r}"
        finally:
            self._connection.close()
            self._ended_at = time.monotonic()
            self._ended.set()

    def _fetch(self) -> None:
        while True:
            self._answer = self._ask()
            if self._answer["state"] == "failed":
                raise _Unusable(f"the worker failed: {self._answer['error']}")
            for name, shape in self._answer["tensors"].items():
                if name not in self.rows:
                    self.rows[name] = self._tensor(name, tuple(shape))
            if self._answer["state"] == "done":
                self._check()
                if self._wants_log_ratios:
                    self.log_ratios = read_log_ratios(self._persist("/log-ratios", {}, TIMEOUT_S))
                return

    def _ask(self) -> dict[str, Any]:
        query = {"have": len(self.rows), "wait_s": POLL_S}
        data = self._persist("/share", query, TIMEOUT_S + POLL_S)
        answer = json.loads(data)
        if not isinstance(answer, dict) or not isinstance(answer.get("tensors"), dict):
            raise _Unusable(f"it says {data[:100]!r}")
        return answer

    def _check(self) -> None:
        if missing := sorted(self._wanted.keys() - self.rows.keys()):
            raise _Unusable(f"done without {missing[0]} and {len(missing) - 1} other tensors")
        if self._answer["tokens"] != self._tokens:
            raise _Unusable(f"of {self._answer['tokens']} tokens instead of {self._tokens}")
        if not all(map(isfinite, (*self._answer["sums"].values(), self._answer["seconds"]))):
            raise _Unusable(f"of no finite loss: {self._answer['sums']}")

    def _tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        rows = self._wanted.get(name)
        if rows is None or rows.shape != shape:
            mine = "no such tensor" if rows is None else f"it as {rows.shape}"
            raise _Unusable(f"{name} is {shape} there, and the trainer has {mine}")
        began = time.monotonic()
        values: NDArray[np.float32] = np.empty((rows.stop - rows.start, rows.width), dtype="<f4")
        block = max(1, BLOCK_BYTES // max(1, BYTES[self._dtype] * rows.width))
        for start in range(rows.start, rows.stop, block):
            stop = min(start + block, rows.stop)
            values[start - rows.start : stop - rows.start] = self._block(name, start, stop, rows)
        self._transfer_s += time.monotonic() - began
        return values.reshape(-1)

    def _block(self, name: str, start: int, stop: int, rows: Rows) -> NDArray[np.float32]:
        query = {"tensor": name, "start": start, "stop": stop}
        data = self._persist("/gradient", query, TIMEOUT_S)
        self._bytes += len(data)
        return to_float32(data, self._dtype).reshape(stop - start, rows.width)

    def _persist(self, path: str, query: Mapping[str, Any], timeout_s: float) -> bytes:
        """Repeat a request until there is an answer, or nobody wants the share."""
        while not self._unwanted.is_set():
            try:
                return self._connection.ask(path, query, timeout_s)
            except ConnectionRefusedError as error:
                raise _Unusable("nothing listens there any more") from error
            except ssl.SSLCertVerificationError as error:
                raise _Unusable(f"another host answers there: {error.verify_message}") from error
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                self._trouble = f"{type(error).__name__}: {error}"
                self._unwanted.wait(RETRY_S)
        raise _Unusable("given up")


class _Connection:
    """A connection to the worker's gradient server, opened when it is needed."""

    def __init__(self, share: WorkerShare, step: int, credentials: Credentials) -> None:
        self._connection = PeerConnection(share.url, credentials.client(), TIMEOUT_S)
        self._about = {"incarnation": share.incarnation, "step": step, "version": share.version}
        self._headers = {"Authorization": f"Bearer {credentials.token}"}

    def ask(self, path: str, query: Mapping[str, Any], timeout_s: float) -> bytes:
        """Return the body.

        Raises:
            _Unusable: the worker refuses.
        """
        connection = self._connection
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(timeout_s)
        url = f"{path}?{urlencode(self._about | dict(query))}"
        connection.request("GET", url, headers=self._headers)
        response = connection.getresponse()
        data = response.read()
        if response.status != HTTPStatus.OK:
            reason = data[:300].decode(errors="replace")
            raise _Unusable(f"{path} answered {response.status}: {reason}")
        return data

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        self._connection.close()
