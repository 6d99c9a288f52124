"""How near the simulated engine is to a recorded run of a real one.

The recorded requests are submitted to the engine at the times the real one queued them, with the
lengths they had; what comes out is compared request by request. Errors are relative to the
recording, so +0.05 means the simulation is 5 % slower.

Guarantee: the engine sees arrivals and lengths, never a recorded time of service. Limit: what holds
for one run holds for its load; a run without waiting says nothing of the queue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from libra_cli.config.errors import LibraError
from libra_cli.core.types import Seconds, Tokens
from libra_cli.sim.engine import Engine, EngineRequest, FinishedRequest, StepTimes


class RunError(LibraError):
    """A recorded run that cannot be read; says file and line."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as it was served; seconds since the first was queued."""

    prompt: Tokens
    generate: Tokens
    queued_at: Seconds
    scheduled_at: Seconds
    first_token_at: Seconds
    finished_at: Seconds

    @property
    def latency_s(self) -> Seconds:
        """From the queue to the last token."""
        return self.finished_at - self.queued_at


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run of one server. Requests are in the order they were queued."""

    model: str
    tensor_parallel: int
    max_num_seqs: int
    chunk_tokens: Tokens
    requests: tuple[RecordedRequest, ...]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Relative errors of a simulation, and how well it orders and spaces the requests.

    ``correlation`` is Pearson's, of the latencies request by request; ``wait_error_s`` the mean
    difference of the time to the first token, in seconds.
    """

    requests: int
    mean_error: float
    p99_error: float
    makespan_error: float
    correlation: float
    wait_error_s: Seconds
    token_error: float

    def within(self, error: float = 0.1, correlation: float = 0.98) -> bool:
        """Whether mean, P99 and makespan are within ``error``, and the correlation above."""
        worst = max(abs(self.mean_error), abs(self.p99_error), abs(self.makespan_error))
        return worst <= error and self.correlation >= correlation


def read_run(requests: Path, meta: Path) -> RecordedRun:
    """Read a recording: ``requests.jsonl``, one request a line, and ``meta.json``.

    A line has ``input_toks``, ``output_toks`` and the clock at ``queued_ts``, ``scheduled_ts``,
    ``first_token_ts`` and ``last_token_ts``. Raises RunError for what is missing or not so.
    """
    try:
        about = json.loads(meta.read_text())
        engine = about["engine_kwargs"]
        shape = (
            str(about["model"]),
            int(engine["tensor_parallel_size"]),
            int(engine["max_num_seqs"]),
            int(engine["max_num_batched_tokens"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{meta}: not a recorded run's meta.json: {error!r}") from error
    try:
        lines = requests.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise RunError(f"{requests}: cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_request(line, f"{requests}:{number}"))
    if not found:
        raise RunError(f"{requests}: has no requests")
    found.sort(key=lambda request: request.queued_at)
    start = found[0].queued_at
    return RecordedRun(*shape, requests=tuple(_since(start, request) for request in found))


def _request(line: str, where: str) -> RecordedRequest:
    try:
        row: dict[str, Any] = json.loads(line)
        request = RecordedRequest(
            prompt=int(row["input_toks"]),
            generate=int(row["output_toks"]),
            queued_at=float(row["queued_ts"]),
            scheduled_at=float(row["scheduled_ts"]),
            first_token_at=float(row["first_token_ts"]),
            finished_at=float(row["last_token_ts"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{where}: not a recorded request: {error!r}") from error
    if request.prompt < 1 or request.generate < 1 or request.latency_s <= 0:
        raise RunError(f"{where}: tokens and latency must be above 0")
    return request


def _since(start: Seconds, request: RecordedRequest) -> RecordedRequest:
    return RecordedRequest(
        request.prompt,
        request.generate,
        request.queued_at - start,
        request.scheduled_at - start,
        request.first_token_at - start,
        request.finished_at - start,
    )


def replay(
    cost: StepTimes, requests: Sequence[RecordedRequest], max_num_seqs: int
) -> list[FinishedRequest]:
    """Serve recorded requests in virtual time; the outcomes are in the order of ``requests``."""
    engine = Engine(cost, max_num_seqs=max_num_seqs)
    done: list[FinishedRequest] = []
    for index, request in sorted(enumerate(requests), key=lambda pair: pair[1].queued_at):
        done += engine.advance(request.queued_at)
        # Each is a session of its own: one that is turned out finds what is left of its context.
        turn = EngineRequest(index, index, request.prompt, request.generate)
        engine.submit(turn, request.queued_at)
    while (at := engine.next_at()) is not None:
        done += engine.advance(at)
    return sorted(done, key=lambda finished: finished.id)


def fidelity(cost: StepTimes, requests: Sequence[RecordedRequest], max_num_seqs: int) -> Fidelity:
    """Replay a recording and compare. Raises ValueError for a recording without requests."""
    if not requests:
        raise ValueError("a recording needs at least one request")
    done = replay(cost, requests, max_num_seqs)
    real = [request.latency_s for request in requests]
    mine = [finished.finished_at - finished.submitted_at for finished in done]
    starts = min(request.queued_at for request in requests)
    real_end = max(request.finished_at for request in requests) - starts
    my_end = max(finished.finished_at for finished in done) - starts
    waits = [
        (finished.first_token_at - finished.submitted_at)
        - (request.first_token_at - request.queued_at)
        for request, finished in zip(requests, done, strict=True)
    ]
    return Fidelity(
        requests=len(requests),
        mean_error=fmean(mine) / fmean(real) - 1,
        p99_error=percentile(mine, 0.99) / percentile(real, 0.99) - 1,
        makespan_error=my_end / real_end - 1,
        correlation=correlation(mine, real),
        wait_error_s=fmean(waits),
        token_error=_token_s(done) / _recorded_token_s(requests) - 1,
    )


def _token_s(done: Sequence[FinishedRequest]) -> Seconds:
    return sum(finished.finished_at - finished.first_token_at for finished in done) or 1e-9


def _recorded_token_s(requests: Sequence[RecordedRequest]) -> Seconds:
    return sum(request.finished_at - request.first_token_at for request in requests) or 1e-9


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie, on the line between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation; 1 for two constant series, 0 for one."""
    one, two = fmean(first), fmean(second)
    above = sum((a - one) * (b - two) for a, b in zip(first, second, strict=True))
    spread_one = sum((a - one) ** 2 for a in first)
    spread_two = sum((b - two) ** 2 for b in second)
    if not spread_one and not spread_two:
        return 1.0
    if not spread_one or not spread_two:
        return 0.0
    return above / sqrt(spread_one * spread_two)
