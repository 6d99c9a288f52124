"""How near the simulated engine is to a recorded run of a real one.

The recorded requests are submitted to the engine at the times the real one queued them, with the
lengths they had; what comes out is compared request by request. Errors are relative to the
recording, so +0.05 means the simulation is 5 % slower.

Guarantee: the engine sees arrivals and lengths, never a recorded time of service. Limit: what holds
for one run holds for its load; a run without waiting says nothing of the queue.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from libra_cli.config.errors import InputError
from libra_cli.core.costs.mixtures import refuse_mixture
from libra_cli.core.types import Seconds, Tokens
from libra_cli.sim.engine import Engine, EngineRequest, FinishedRequest, StepTimes
from libra_cli.sim.profiles import load_profile
from tests.research.fidelity.layer_times import DEFAULT_INTERCONNECT, layer_times

REQUESTS, META = "requests.jsonl", "meta.json"
WANTED_ERROR, WANTED_CORRELATION = 0.1, 0.98
"""The largest relative error of mean, P99 and makespan, and the least correlation of latencies,
with which the simulator counts as near enough; chosen."""


class RunError(InputError):
    """A recorded run that cannot be read; says file and line."""


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
        """Seconds from the queue to the last token."""
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

    @property
    def within(self) -> bool:
        """Whether mean, P99 and makespan are as near as wanted, and the correlation as high."""
        worst = max(abs(self.mean_error), abs(self.p99_error), abs(self.makespan_error))
        return worst <= WANTED_ERROR and self.correlation >= WANTED_CORRELATION


@dataclass(frozen=True, slots=True)
class ServerComparison:
    """A recording beside its simulation. ``prices`` says where the costs come from."""

    recorded: RecordedRun
    prices: str
    fidelity: Fidelity


def compare_server(
    requests: Path,
    meta: Path | None,
    *,
    profile: str,
    layers: Path | None,
    gpu: str,
    interconnect: str = DEFAULT_INTERCONNECT,
) -> ServerComparison:
    """The simulated engine beside a recorded run, with a profile or with per-layer measurements.

    ``meta`` left out is the file beside the requests whose name ends in ``meta.json``; ``gpu`` left
    out is the beginning of the requests' file name. ``interconnect`` is between the GPUs of a
    server that per-layer measurements are of one share of. Nothing is fitted to the run.

    Raises:
        LibraError: a file that cannot be read, a server the profile does not have, or a model that
            is a mixture of experts.
    """
    recorded = read_run(requests, meta or _beside(requests))
    refuse_mixture(recorded.model, {})
    if layers is None:
        cost, prices = _from_profile(profile, recorded), f"profile {profile}"
    else:
        chosen = gpu or requests.name.partition("_")[0]
        cost = _from_layers(layers, chosen, recorded, interconnect)
        between = f", {interconnect}" if recorded.tensor_parallel > 1 else ""
        prices = f"{layers}{between}"
    found = fidelity(cost, recorded.requests, recorded.max_num_seqs)
    return ServerComparison(recorded, prices, found)


def _beside(requests: Path) -> Path:
    meta = requests.with_name(requests.name.removesuffix(REQUESTS) + META)
    if not requests.is_file():
        raise RunError(f"{requests}: there is no such file", hint=f"ls {requests.parent}")
    if not (requests.name.endswith(REQUESTS) and meta.is_file()):
        raise RunError(
            f"{requests}: what server it is of is not beside it", hint="--meta META.json"
        )
    return meta


def _from_profile(name: str, recorded: RecordedRun) -> StepTimes:
    profile = load_profile(name)
    model = recorded.model.rpartition("/")[2]
    if profile.model.rpartition("/")[2].lower() != model.lower():
        raise RunError(
            f"profile {name} is of {profile.model}, and the run of {model}",
            hint="give a profile of that model, or --layers DIRECTORY",
        )
    cost = profile.servers.get(recorded.tensor_parallel)
    if cost is None:
        raise RunError(
            f"profile {name} has no server of {recorded.tensor_parallel} GPUs",
            hint=f"it has TP {', '.join(map(str, profile.servers))}; give another, or --layers",
        )
    return cost


def _from_layers(folder: Path, gpu: str, recorded: RecordedRun, interconnect: str) -> StepTimes:
    return layer_times(
        folder,
        gpu,
        recorded.model,
        recorded.tensor_parallel,
        chunk_tokens=recorded.chunk_tokens,
        interconnect=interconnect,
    )


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
        p99_error=float(np.quantile(mine, 0.99) / np.quantile(real, 0.99)) - 1,
        makespan_error=my_end / real_end - 1,
        correlation=correlation(mine, real),
        wait_error_s=fmean(waits),
        token_error=_token_s(done) / _recorded_token_s(requests) - 1,
    )


def _token_s(done: Sequence[FinishedRequest]) -> Seconds:
    return sum(finished.finished_at - finished.first_token_at for finished in done) or 1e-9


def _recorded_token_s(requests: Sequence[RecordedRequest]) -> Seconds:
    return sum(request.finished_at - request.first_token_at for request in requests) or 1e-9


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation; 1 for two constant series, 0 for one."""
    constant = [len(set(series)) == 1 for series in (first, second)]
    if any(constant):
        return float(all(constant))
    return statistics.correlation(first, second)
