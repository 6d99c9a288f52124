"""How fast the deciding parts are, by the clock: on one core each, and the simulator on all.

python -m tests.research.speed [--json FILE]
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, cycle
from random import Random

import typer

from libra_cli.bench.config import Progress
from libra_cli.bench.jobs import Job, longest_of, world_of
from libra_cli.bench.parallel import simulated
from libra_cli.bench.report.sheets import Report
from libra_cli.bench.report.terminal import Sheet, amount
from libra_cli.cli.reports import Json, show_report, working
from libra_cli.cli.terminal import errors_told
from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.search import propose
from libra_cli.core.scheduling.least_cost import LeastExpectedCost
from libra_cli.core.scheduling.request_scheduler import RequestScheduler
from libra_cli.core.scheduling.server_queues import Request, ServerQueue
from libra_cli.core.types import (
    Bucket,
    Seconds,
    TrajectoryId,
    WeightVersion,
)
from libra_cli.core.workload import Workload
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import DEFAULT_TRACE, RecordedEpisode, Trace, load_trace

PROFILE = "a800-qwen3-14b"
SIMULATED_TURNS = 100_000
"""Turns that each core simulates at least, to take the time of."""
IN_FLIGHT = 100_000
"""Trajectories under way while decisions are timed."""
SERVERS = 256
DECISIONS = 20_000
GROUP = 16


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One measured speed. ``wanted`` is a limit from above, or from below if not ``at_most``."""

    what: str
    number: float
    unit: str
    wanted: float | None = None
    at_most: bool = True

    @property
    def reached(self) -> bool | None:
        """Whether it is as wanted; None where nothing is wanted."""
        if self.wanted is None:
            return None
        return self.number <= self.wanted if self.at_most else self.number >= self.wanted


def speed(progress: Progress) -> list[SpeedRow]:
    """Everything that is promised a speed, on the default trace."""
    trace, profile = load_trace(DEFAULT_TRACE), load_profile(PROFILE)
    rows: list[SpeedRow] = []
    for gpus, wanted in ((128, 0.1), (1024, 1.5)):
        progress(f"planning {gpus} GPUs")
        rows.append(SpeedRow(f"plan for {gpus} GPUs", _plan_s(trace, profile, gpus), "s", wanted))
    progress(f"placing turns with {IN_FLIGHT:,} trajectories in flight")
    rows += _decisions(trace, profile)
    progress(f"simulating {SIMULATED_TURNS:,} turns on every core")
    rows.append(_simulator(trace, profile, progress))
    return rows


def _plan_s(trace: Trace, profile: Profile, gpus: int) -> Seconds:
    longest = longest_of(profile, gpus)
    samples = tuple(episode.sample(longest) for episode in trace.episodes[:1024])
    workload = Workload(samples, trajectories=4 * gpus)
    began = time.perf_counter()
    propose(profile, workload, gpus)
    return time.perf_counter() - began


@dataclass(slots=True)
class _TimedTrajectory:
    who: TrajectoryId
    episode: RecordedEpisode
    turn: int = 0
    generated: int = 0
    context: int = 0


def _decisions(trace: Trace, profile: Profile) -> list[SpeedRow]:
    """A tool's return to a server's seat: the choice, the queue and the way out."""
    before = _resident_mib()
    scheduler = RequestScheduler(LeastExpectedCost())
    scheduler.refresh(_lanes(profile), now=0.0)
    flights = _take_off(trace)
    random = Random(0)
    took: list[Seconds] = []
    for number in range(DECISIONS + DECISIONS // 10):
        flight = random.choice(flights)
        began = time.perf_counter()
        _one_turn(flight, scheduler, number)
        if number >= DECISIONS // 10:  # what came before warmed it up
            took.append(time.perf_counter() - began)
    took.sort()
    middle, most = took[len(took) // 2], took[int(0.99 * len(took))]
    label = f"a decision, {IN_FLIGHT:,} in flight, {SERVERS} servers"
    return [
        SpeedRow(f"{label}: median", middle * 1e6, "us", 100.0),
        SpeedRow(f"{label}: P99", most * 1e6, "us", 1000.0),
        SpeedRow("decisions", len(took) / sum(took), "1/s", None),
        SpeedRow(f"memory of {IN_FLIGHT:,} in flight", _resident_mib() - before, "MiB", None),
    ]


def _lanes(profile: Profile) -> list[ServerQueue]:
    degrees = sorted(profile.servers)
    bounds = {degree: 2048 * 4**place for place, degree in enumerate(degrees)}
    kinds = [Bucket(f"TP{d}", d, IN_FLIGHT, bounds[d]) for d in degrees]
    chosen = [bucket for bucket, _ in zip(cycle(kinds), range(SERVERS), strict=False)]
    return [
        ServerQueue(
            f"node-{number}/0", bucket, profile.servers[bucket.tensor_parallel], WeightVersion(1, 0)
        )
        for number, bucket in enumerate(chosen)
    ]


def _take_off(trace: Trace) -> list[_TimedTrajectory]:
    """100,000 trajectories have begun."""
    episodes = cycle(trace.episodes)
    return [
        _TimedTrajectory(TrajectoryId(number // GROUP, number % GROUP), episode)
        for number, episode in zip(range(IN_FLIGHT), episodes, strict=False)
    ]


def _play(flight: _TimedTrajectory) -> Request:
    """One turn and its tool's return."""
    turn = flight.episode.turns[flight.turn % len(flight.episode.turns)]
    flight.turn += 1
    flight.generated += turn.generated
    flight.context = flight.episode.prompt + flight.generated + turn.observation
    return Request(
        trajectory=flight.who,
        context=flight.context,
        generated=flight.generated,
        turns=flight.turn,
        tools=flight.turn,
        waiting_since=0.0,
        last_slot=f"node-{flight.who.group % SERVERS}/0",
        last_key=WeightVersion(1, 0),
    )


def _one_turn(flight: _TimedTrajectory, scheduler: RequestScheduler, number: int) -> None:
    scheduler.submit(_play(flight), now=float(number))
    for request, _ in scheduler.dispatch(now=float(number)):
        scheduler.left(request.trajectory)


def _simulator(trace: Trace, profile: Profile, progress: Progress) -> SpeedRow:
    """Whole runs, machine and all, a process for every core as in an experiment: seconds for a
    million turns, from the turns that all play in a second.
    """
    cores = len(os.sched_getaffinity(0))
    jobs = [Job(trace, profile, profile, 48, "libra", "uniform", seed) for seed in range(cores)]
    played = list(simulated(_played, jobs, progress))
    turns_s = sum(turns / seconds for turns, seconds in played)
    label = f"a million simulated turns on {cores} cores, by {sum(t for t, _ in played):,}"
    return SpeedRow(label, 1e6 / turns_s, "s", 60.0)


def _played(job: Job) -> tuple[int, Seconds]:
    """Turns of whole runs, at least ``SIMULATED_TURNS``, and the seconds of a core they took."""
    turns, took = 0, 0.0
    for seed in count(1000 * job.seed):
        world = world_of(replace(job, seed=seed))
        began = time.process_time()
        world.run()
        took += time.process_time() - began
        turns += len(world.recording.turns)
        if turns >= SIMULATED_TURNS:
            break
    return turns, took


def _resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def speed_report(rows: Sequence[SpeedRow]) -> Report:
    """Measured speeds beside the wanted ones."""
    columns = ("what", "measured", "wanted", "")
    sheet = Sheet("speed", columns, [_told(row) for row in rows])
    return Report((sheet,), {"speed": [{**asdict(row), "reached": row.reached} for row in rows]})


def _told(row: SpeedRow) -> tuple[str, str, str, str]:
    measured = f"{amount(row.number)} {row.unit}"
    if row.wanted is None:
        return row.what, measured, "", ""
    wanted = f"{'≤' if row.at_most else '≥'} {amount(row.wanted)} {row.unit}"
    return row.what, measured, wanted, "✓" if row.reached else "✗"


def main(json_file: Json = None) -> None:
    """Decisions a second, plan times, turns a second of the simulator."""
    with errors_told():
        with working() as progress:
            rows = speed(progress)
        show_report(speed_report(rows), json_file)


if __name__ == "__main__":
    typer.run(main)
