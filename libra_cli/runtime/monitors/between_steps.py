"""What was saved between two steps: means over it, and a few trajectories drawn from it.

``saw`` is called by the run's event loop for every record, so it counts and keeps references only:
JSON is read, and text decoded, by whoever asks for it.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random
from statistics import fmean

from libra_cli.core.metric_names import is_number, key_of
from libra_cli.core.records import Record, SampleRecord, SyncRecord, TrajectoryRecord, TurnRecord
from libra_cli.core.types import is_evaluation

_SERVER_NUMBERS = (
    "running",
    "waiting",
    "kv_use",
    "prefix_hit_rate",
    "preemptions",
    "occupancy",
    "tokens_per_s",
)


class BetweenSteps:
    """What has been saved since the step before; ``samples`` of its trajectories are kept.

    A trajectory that has ended is kept with the same probability as any other (reservoir sampling,
    Vitter 1985, algorithm R), and the same run draws the same ones again.
    """

    def __init__(self, run_id: str, samples: int) -> None:
        self._run_id = run_id
        self._most = samples
        self._begin(step=0)

    def _begin(self, step: int) -> None:
        self._random = Random(f"{self._run_id} {step}")
        self._ended = 0
        self._sampled: list[TrajectoryRecord] = []
        self._turns = self._cut = 0
        self._called: list[TurnRecord] = []
        self._readings: list[SampleRecord] = []
        self._syncs: list[float] = []

    def saw(self, record: Record) -> None:
        """Take in one record; what is played to evaluate is told by its own metrics."""
        match record:
            case TurnRecord() | TrajectoryRecord() if is_evaluation(record.group_id):
                pass
            case TurnRecord():
                self._turns += 1
                self._cut += record.finish_reason == "length"
                if record.tools_json != "[]":
                    self._called.append(record)
            case TrajectoryRecord(state="finished"):
                self._draw(record)
            case SampleRecord():
                self._readings.append(record)
            case SyncRecord() if record.verified:
                self._syncs.append(record.served_at - record.published_at)
            case _:
                pass

    def _draw(self, record: TrajectoryRecord) -> None:
        self._ended += 1
        if len(self._sampled) < self._most:
            self._sampled.append(record)
        elif (place := self._random.randrange(self._ended)) < self._most:
            self._sampled[place] = record

    def take(self, step: int) -> tuple[dict[str, float], list[TrajectoryRecord]]:
        """The means by the names of ``core.metric_names`` and the samples, and begin again."""
        outcomes = [call.outcome for turn in self._called for call in turn.tools]
        metrics = _of_servers(self._readings)
        if self._turns:
            metrics["response_length/clip_ratio"] = self._cut / self._turns
        if outcomes:
            metrics["tools/failure_rate"] = fmean(outcome != "ok" for outcome in outcomes)
        if self._syncs:
            metrics["time/weight_sync"] = fmean(self._syncs)
        sampled = self._sampled
        self._begin(step)
        return metrics, sampled


def server_metrics(reading: SampleRecord) -> dict[str, float | None]:
    """The numbers of a server by the names that monitors know."""
    named = {name: getattr(reading, name) for name in _SERVER_NUMBERS} | reading.metrics
    return {key_of("server", name): value for name, value in named.items()}


def _of_servers(readings: list[SampleRecord]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for reading in readings:
        for key, value in server_metrics(reading).items():
            if is_number(value):
                values[key].append(value)
    return {key: fmean(found) for key, found in values.items()}
