"""Why libra was behind the best static plan: the seconds it lost, step by step, by their cause.

Both runs train the same groups in as many steps. If libra took d[k] seconds for step k and the best
static plan b[k], and S is the tokens that libra trained over those that the other trained, it lost
d[k] - S b[k] in that step. Over libra's makespan these add up to its regret, exactly, and so do the
causes; below zero something was gained::

    moving       GPU-seconds in which slots on their way, or of a trainer that restarts, did
                 nothing, over the GPUs of the run
    filling      the rest of the first steps, of which as many as may be in flight
    wrong plan   the rest of steps under other servers than the best plan's, which the planner had
                 not looked at yet, or with work from which lengths have drifted since
    wrong price  the same where it had looked with work of today's lengths, and wanted these servers
    same plan    the rest of steps under the servers of the best plan: its GPUs train as a base
                 group and workers, and trajectories meet other neighbours

Limit: single steps of both come in bursts and a cause is as sharp as the steps it has; what a wrong
plan leaves behind (trajectories half grown) is told of the steps in which they are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from libra_cli.bench.results import ResultRow
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.planning.admission import drifted
from libra_cli.core.records import MoveRecord
from libra_cli.core.types import Role, Seconds, SlotId
from libra_cli.sim.recording import Recording

CAUSES = ("filling", "wrong plan", "moving", "wrong price", "same plan")
_WITHOUT_WORK = ("drain", "stop", "start", "sync", "verify")
"""Phases of a move in which its slot does nothing for the job, or less and less."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One optimizer step of a run whose plan may change.

    ``ended_at`` is when it ended and ``moving_s`` what its moves cost, in seconds of the whole job.
    ``servers`` are numbers of servers by tensor-parallel degree, as planned when it began.
    ``looked``: the planner had looked by then, with work of about this step's lengths.
    """

    ended_at: Seconds
    moving_s: Seconds
    servers: dict[int, int]
    looked: bool


def planned_steps(recording: Recording, gpus: int) -> tuple[PlannedStep, ...]:
    """Return the steps of a recorded run on ``gpus`` GPUs, each with its plan and its moves."""
    lengths = [step.mean_length for step in recording.steps]
    borders = pairwise([0.0, *(step.ended_at for step in recording.steps)])
    return tuple(
        PlannedStep(
            ended_at=end,
            moving_s=_idle_gpu_s(recording, start, end) / gpus,
            servers=_servers(recording, start),
            looked=_has_looked(recording, lengths, start, length),
        )
        for (start, end), length in zip(borders, lengths, strict=True)
    )


def _servers(recording: Recording, at: Seconds) -> dict[int, int]:
    """Return the numbers of servers by degree that the plan of this time wants."""
    plan = max((row for row in recording.plans.values() if row.at <= at), key=lambda row: row.plan)
    degrees = [server.tensor_parallel for server in plan.servers]
    return {degree: degrees.count(degree) for degree in sorted(set(degrees))}


def _has_looked(recording: Recording, lengths: Sequence[float], at: Seconds, length: float) -> bool:
    """Whether the newest look by then was at work like that of a step of this mean ``length``."""
    looks = [step for when, step in recording.looks if when <= at]
    return bool(looks) and not drifted(lengths[max(looks[-1] - 1, 0)], length)


def _idle_gpu_s(recording: Recording, start: Seconds, end: Seconds) -> float:
    sizes = {row.slot: len(row.gpus) for _, row in recording.slots}
    moving = [(move.slot, *time) for move in recording.moves.values() for time in _phases(move)]
    stays = set(sizes) - {slot for slot, since, until in moving if since < end and until > start}
    restarting = [each for each in _restarts(recording) if each[0] in stays]
    return sum(
        sizes.get(slot, 0) * max(0.0, min(end, until) - max(start, since))
        for slot, since, until in [*moving, *restarting]
    )


def _restarts(recording: Recording) -> Iterator[tuple[SlotId, Seconds, Seconds]]:
    """Yield from when and until when each slot of a trainer that had trained was restarted."""
    trained: set[SlotId] = set()
    down: dict[SlotId, Seconds] = {}
    for at, row in recording.slots:
        waits = row.role == Role.TRAIN and row.state != ReplicaState.TRAINING
        if waits and row.slot in trained:
            down.setdefault(row.slot, at)
        elif row.slot in down:
            yield row.slot, down.pop(row.slot), at
        if (row.role, row.state) == (Role.TRAIN, ReplicaState.TRAINING):
            trained.add(row.slot)


def _phases(move: MoveRecord) -> Iterator[tuple[Seconds, Seconds]]:
    for phase in move.phases:
        if phase.phase in _WITHOUT_WORK and phase.ended_at is not None:
            yield phase.started_at, phase.ended_at


def shares_lost(
    steps: Sequence[PlannedStep],
    row: ResultRow,
    best: ResultRow,
    best_ended: Sequence[Seconds],
    *,
    servers: dict[int, int],
    filling: int,
) -> dict[str, float]:
    """Return the share of a run's makespan that it lost to the best static plan, by cause.

    ``row`` and ``best`` are the results of both runs, ``best_ended`` when each step of the static
    one ended, ``servers`` its servers by degree; ``filling`` steps fill the pipeline.
    """
    tokens = row.throughput_tok_s * row.makespan_s / (best.throughput_tok_s * best.makespan_s)
    mine = pairwise([0.0, *(step.ended_at for step in steps[:-1]), row.makespan_s])
    theirs = pairwise([0.0, *best_ended[:-1], best.makespan_s])
    lost_s = dict.fromkeys(CAUSES, 0.0)
    for number, (step, (since, end), (began, ended)) in enumerate(
        zip(steps, mine, theirs, strict=True)
    ):
        lost_s["moving"] += step.moving_s
        cause = "filling" if number < filling else _cause(step, servers)
        lost_s[cause] += end - since - tokens * (ended - began) - step.moving_s
    return {cause: seconds / row.makespan_s for cause, seconds in lost_s.items()}


def _cause(step: PlannedStep, best: dict[int, int]) -> str:
    if step.servers == best:
        return "same plan"
    return "wrong price" if step.looked else "wrong plan"
