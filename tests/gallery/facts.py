"""What is known of a run of the gallery: read from its run directory, kept as JSON.

Page and pictures are made from these files alone, so that a number on the page is one of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from libra_cli.api import LoadedRun
from libra_cli.core.records import EvaluationRecord
from libra_cli.report.status.steps import IMITATES
from libra_cli.report.trajectories.choice import PlayedTrajectory, trained_in
from libra_cli.report.trajectories.conversation import conversation_of
from libra_cli.runtime.store.reader import Reader
from tests.gallery.entries import CHECKOUT

FOLDER = CHECKOUT / "libra_cli" / "help" / "gallery"
LONGEST_MESSAGE = 400
MOST_MESSAGES = 10
"""Characters of a message and messages of a trajectory that are kept; more lose their middle."""


class Fact(BaseModel):
    """A part of the facts, which has no other keys than these."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(Fact):
    """The machine that a run was made on; ``load`` is the mean of the minute before it began."""

    cpu: str
    cores: int
    memory_gib: int
    gpus: list[str]
    load: float
    versions: dict[str, str]
    commit: str

    @property
    def is_busy(self) -> bool:
        """Whether others wanted more than the cores before the run began."""
        return self.load > self.cores


class Seconds(Fact):
    """Seconds of ``libra run``: all of it, and from its start to the start of the first step."""

    whole: float
    until_first_step: float
    steps: float
    """From the start of the first step to the end of the last."""
    built_model: bool
    """Whether the model was made in this run; else a run before it had."""


class Curve(Fact):
    """A metric by step, and when each step ended, in seconds from the start of the first."""

    metric: str
    values: list[float]
    ended_at: list[float]


class Examination(Fact):
    """The estimates of an evaluation, with 95 % intervals."""

    step: int | None
    """The step of the weights; None of a model directory."""
    tasks: int
    samples: int
    pass_at_1: float
    low: float
    high: float


class Message(Fact):
    """What one side said in a trajectory."""

    role: str
    text: str


class Trajectory(Fact):
    """A trajectory that a step was trained on, or imitated."""

    step: int
    reward: float | None
    messages: list[Message]


class Lane(Fact):
    """The states of a slot as (start, end, state), in seconds from the start of the first step."""

    slot: str
    states: list[tuple[float, float, str]]


class SlotMove(Fact):
    """A slot that changed sides, in seconds from the start of the first step."""

    slot: str
    to: str
    started_at: float
    ended_at: float


class ServerKill(Fact):
    """A vLLM server that was killed, in seconds from the start of the first step."""

    slot: str
    how: str = "killed (kill -9)"
    at: float
    serves_again_at: float
    """When the slot served again, with the newest weights."""


class Timeline(Fact):
    """What every slot did, over the steps of the run."""

    lanes: list[Lane]
    moves: list[SlotMove]
    kill: ServerKill | None


class Facts(Fact):
    """All that is kept of a run."""

    name: str
    recipe: str
    commands: list[str]
    day: str
    machine: Machine
    seconds: Seconds
    curve: Curve
    tokens_per_s: float | None
    """Generated (or imitated) tokens of a batch over the step's seconds, the median over steps."""
    evaluations: list[Examination]
    """In the run."""
    before: Examination | None
    """The model that it began with, played by servers alone; None if the run played it."""
    exported: Examination
    """The model that it made, the same way."""
    trajectories: list[Trajectory]
    timeline: Timeline | None = None
    """Of a run whose slots change sides."""
    further: Mapping[int, Curve] = {}
    """The curves of runs of the same recipe with other seeds."""

    @property
    def imitates(self) -> bool:
        """Whether the steps imitated demonstrations, and nothing was generated."""
        return self.curve.metric == f"train/{IMITATES}"


def facts_of(run: LoadedRun, known: Mapping[str, Any], metric: str) -> Facts:
    """The facts of a finished run; ``known``: those that its run directory does not tell.

    ``known`` has ``built_model`` and ``whole_s`` beside fields of ``Facts``.
    """
    first, last = run.steps[0], run.steps[-1]
    with Reader(run.directory) as reader:
        began = reader.run().started_at
        shown = [*_shown(reader, first.step), *_shown(reader, last.step)]
    rates = [step.metrics["perf/tokens_per_s"] for step in run.steps]
    given = {name: value for name, value in known.items() if name in Facts.model_fields}
    return Facts(
        **given,
        seconds=Seconds(
            whole=round(known["whole_s"], 1),
            until_first_step=round(first.started_at - began, 1),
            steps=round(last.ended_at - first.started_at, 1),
            built_model=known["built_model"],
        ),
        curve=curve_of(run, metric),
        tokens_per_s=round(median(rates), 1) if any(rates) else None,
        evaluations=[_examination(row) for row in run.evaluations if row.state == "finished"],
        trajectories=shown,
    )


def curve_of(run: LoadedRun, metric: str) -> Curve:
    """The values of a metric that every step of a finished run has."""
    began = run.steps[0].started_at
    return Curve(
        metric=metric,
        values=[round(step.metrics[metric], 4) for step in run.steps],
        ended_at=[round(step.ended_at - began, 1) for step in run.steps],
    )


def _examination(row: EvaluationRecord) -> Examination:
    return examination(row.metrics, step=row.step, tasks=row.tasks, samples=row.samples)


def examination(
    metrics: Mapping[str, float], *, step: int | None, tasks: int, samples: int
) -> Examination:
    """An evaluation's estimates of pass@1."""
    low, high = (round(metrics[f"pass@1/{side}"], 3) for side in ("low", "high"))
    passed = round(metrics["pass@1"], 3)
    return Examination(
        step=step, tasks=tasks, samples=samples, pass_at_1=passed, low=low, high=high
    )


def _shown(reader: Reader, step: int) -> Iterator[Trajectory]:
    """Yield of a step the trajectory of median reward, of equal ones that of median length."""
    played = sorted(trained_in(reader, step), key=lambda one: one.reward)
    if not played:
        return
    middle = played[(len(played) - 1) // 2].reward
    typical = [one for one in played if one.reward == middle]
    typical.sort(key=lambda one: (one.row.context_tokens, one.id))
    one = typical[(len(typical) - 1) // 2]
    yield Trajectory(step=step, reward=one.row.reward, messages=_messages(reader, one))


def _messages(reader: Reader, one: PlayedTrajectory) -> list[Message]:
    (*_, branch) = conversation_of(reader, one, by_token=False).branches
    told = [Message(role=part.role, text=_shortened(part.text)) for part in branch]
    surplus = len(told) - MOST_MESSAGES
    if surplus <= 0:
        return told
    half = MOST_MESSAGES // 2
    left_out = Message(role="", text=f"[{surplus} messages left out]")
    return [*told[:half], left_out, *told[-half:]]


def _shortened(text: str) -> str:
    surplus = len(text) - LONGEST_MESSAGE
    if surplus <= 0:
        return text
    half = LONGEST_MESSAGE // 2
    return f"{text[:half]} [{surplus} characters left out] {text[-half:]}"


def path_of(name: str, folder: Path = FOLDER) -> Path:
    """Where the facts of an entry are."""
    return folder / f"{name}.json"


def read(name: str, folder: Path = FOLDER) -> Facts | None:
    """The facts that were kept of an entry; None if there are none.

    Raises:
        ValidationError: the file holds something else.
    """
    path = path_of(name, folder)
    return Facts.model_validate_json(path.read_bytes()) if path.is_file() else None


def write(facts: Facts, folder: Path = FOLDER) -> Path:
    """Keep the facts of an entry; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(facts.name, folder)
    path.write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return path
