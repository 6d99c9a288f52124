"""What ``libra bench`` does, without the terminal: finds traces and names, runs, writes files.

A trace is a file, or the name (or the beginning of the name) of one that comes with libra.
"""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from libra_cli.bench.results import Comparison, ExperimentOutcome, compare, to_json
from libra_cli.config.errors import LibraError
from libra_cli.sim.traces import Trace, load_trace

if TYPE_CHECKING:
    from libra_cli.core.costs.profile import Profile

DEFAULT_TRACE = "tau2bench"
RUNS = Path("runs")
REPORT = "bench.html"
_SUFFIXES = (".jsonl.gz", ".jsonl")

Progress: TypeAlias = Callable[[str], None]


class BenchError(LibraError):
    """An argument of ``libra bench`` that means nothing."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """What to measure, and on what. ``drift``: stretch factors of the generated tokens over a run,
    evenly spaced and linear in between; empty for none."""

    traces: tuple[Trace, ...]
    profile: Profile
    gpus: int
    seeds: int
    policies: tuple[str, ...]
    planners: tuple[str, ...]
    policy: str
    drift: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """An experiment's outcome with what may be concluded from it."""

    title: str
    outcome: ExperimentOutcome
    comparisons: list[Comparison]


# -- what the arguments mean ---------------------------------------------------------------------


def setting(
    *,
    traces: Sequence[str],
    profile: str,
    gpus: int,
    seeds: int,
    policies: str,
    planners: str,
    policy: str,
    drift: str,
) -> ExperimentConfig:
    """The arguments, looked up. Lists are separated by commas; empty means all there are.

    Raises:
        BenchError: an unknown policy or planner, or a drift that is none.
        TraceError: a trace that cannot be read, with file and line.
        LibraError: a profile that is none.
    """
    from libra_cli.bench import runs as experiments

    return ExperimentConfig(
        traces=tuple(load_trace(trace_path(name)) for name in traces or (DEFAULT_TRACE,)),
        profile=profile_of(profile),
        gpus=gpus,
        seeds=seeds,
        policies=chosen("policy", policies, experiments.POLICIES),
        planners=chosen("planner", planners, experiments.PLANNERS),
        policy=chosen("policy", policy, experiments.POLICIES)[0],
        drift=drift_of(drift),
    )


def shipped_traces() -> dict[str, Path]:
    """The traces that come with libra, by name."""
    directory = Path(str(resources.files("libra_cli") / "traces"))
    files = [path for path in sorted(directory.glob("*")) if path.name.endswith(_SUFFIXES)]
    return {_stem(path.name): path for path in files}


def trace_path(name: str) -> Path:
    """A file, or the shipped trace whose name begins so.

    Raises:
        BenchError: it is neither.
    """
    if name.endswith(_SUFFIXES) or Path(name).exists():
        return Path(name)
    shipped = shipped_traces()
    found = [path for known, path in shipped.items() if known.startswith(name) and name]
    if len(found) == 1 or name in shipped:
        return shipped.get(name) or found[0]
    raise BenchError(
        f"{name!r} is neither a file nor the beginning of one shipped trace's name"
        f" (shipped: {', '.join(shipped)}){_meant(name, shipped)}",
        hint="libra bench --trace FILE.jsonl.gz, or a shipped name such as " + DEFAULT_TRACE,
    )


def profile_of(name: str) -> Profile:
    """A shipped profile, or one in a file.

    Raises:
        LibraError: there is none of that name, or it is none.
    """
    from libra_cli.sim.profiles import known_profiles, load_profile

    known = known_profiles()
    if name not in known and not Path(name).exists():
        raise BenchError(
            f"there is no profile {name!r}, nor such a file{_meant(name, known)}",
            hint=f"choose among {', '.join(known)}, or give a file",
        )
    return load_profile(name)


def chosen(kind: str, wanted: str, known: Sequence[str]) -> tuple[str, ...]:
    """Names separated by commas, each one known, in the order given; all if none is given.

    Raises:
        BenchError: one is unknown; says which there are.
    """
    names = tuple(dict.fromkeys(name.strip() for name in wanted.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise BenchError(
                f"there is no {kind} {name!r}{_meant(name, known)}",
                hint=f"choose among {', '.join(known)}",
            )
    return names or tuple(known)


def drift_of(text: str) -> tuple[float, ...]:
    """``4`` or ``1,4``: generations end four times as long; ``1,4,1``: and come back; ``none``.

    Raises:
        BenchError: not numbers above zero.
    """
    if text.strip().lower() in ("", "none", "1"):
        return ()
    try:
        factors = tuple(float(part) for part in text.split(","))
    except ValueError:
        factors = (math.nan,)
    if not all(0 < factor < math.inf for factor in factors):
        raise BenchError(
            f"--drift {text!r} is not a list of factors above zero",
            hint="--drift 1,4 lets generations grow to four times their length; --drift none",
        )
    return factors if len(factors) > 1 else (1.0, *factors)


def warnings(given: ExperimentConfig) -> list[str]:
    """What the reader should know before the numbers: one line each."""
    lines = [
        f"{trace.name} has no {', no '.join(trace.lacks)}: what would use them, cannot"
        for trace in given.traces
        if trace.lacks
    ]
    if given.seeds < 2:
        lines.append("one seed gives no intervals, and nothing to tell luck by: --seeds 3 or more")
    return lines


# -- experiments ---------------------------------------------------------------------------------


def schedule(given: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """Policies on a fixed plan."""
    from libra_cli.bench import runs as experiments

    outcome = experiments.schedule(
        given.traces,
        profile=given.profile,
        gpus=given.gpus,
        policies=given.policies,
        seeds=given.seeds,
        progress=progress,
    )
    return _answer("policies on a fixed plan", outcome)


def plan(given: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """Planners on a fixed policy, under drift."""
    from libra_cli.bench import runs as experiments

    outcome = experiments.plan(
        given.traces,
        profile=given.profile,
        gpus=given.gpus,
        planners=given.planners,
        policy=given.policy,
        drift=given.drift,
        seeds=given.seeds,
        progress=progress,
    )
    return _answer(f"planners with {given.policy}", outcome)


def ablation(given: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """libra built up part by part, and its scheduler with each part removed."""
    from libra_cli.bench import runs as experiments

    outcome = experiments.ablation(
        given.traces,
        profile=given.profile,
        gpus=given.gpus,
        seeds=given.seeds,
        drift=given.drift,
        progress=progress,
    )
    return _answer("libra, part by part", outcome)


def sensitivities(given: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """The policies where a step costs more, and where the costs are estimated wrongly."""
    from libra_cli.bench import runs as experiments

    outcome = experiments.sensitivities(
        given.traces,
        profile=given.profile,
        gpus=given.gpus,
        policies=given.policies,
        seeds=given.seeds,
        progress=progress,
    )
    return _answer("where costs are others, or estimated wrongly", outcome)


def _answer(title: str, outcome: ExperimentOutcome) -> ExperimentResult:
    return ExperimentResult(title, outcome, compare(outcome.rows))


# -- files ---------------------------------------------------------------------------------------


def answers_json(answers: Iterable[ExperimentResult]) -> str:
    """One JSON object of all of them: ``rows``, ``summary`` and ``notes``."""
    answers = list(answers)
    told = to_json(
        [row for answer in answers for row in answer.outcome.rows],
        [
            s
            for answer in answers
            for comparison in answer.comparisons
            for s in comparison.summaries
        ],
    )
    told["notes"] = [note for answer in answers for note in answer.outcome.notes]
    return json_text(told)


def json_text(told: Any) -> str:
    """As text; JSON knows no NaN, so what is not a number is null."""
    return json.dumps(_finite(told), indent=2, allow_nan=False) + "\n"


def write(path: Path, text: str) -> Path:
    """Write a file, and the directory it lies in.

    Raises:
        BenchError: there is no room or no right to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}", hint=f"ls -ld {path.parent}") from error
    return path


def new_directory() -> Path:
    """Where a report goes if nobody says where; nothing is created yet."""
    return RUNS / time.strftime("bench-%Y%m%d-%H%M%S")


def write_report(
    directory: Path, answers: Sequence[ExperimentResult], given: ExperimentConfig, command: str
) -> Path:
    """Write ``bench.html``; about a second, most of it for drawing.

    Raises:
        LibraError: it cannot be written.
    """
    from libra_cli.bench.report.html import Section, bench_page

    sections = [
        Section(answer.title, answer.comparisons, answer.outcome.notes) for answer in answers
    ]
    stories = [story for answer in answers for story in answer.outcome.stories]
    seeds = "1 seed" if given.seeds == 1 else f"{given.seeds} seeds"
    parts = (f"{given.gpus} {given.profile.gpu}", given.profile.model, seeds)
    about = " · ".join((*parts, *(trace.name for trace in given.traces)))
    page = bench_page(sections, stories, about=about, command=command, told=warnings(given))
    return write(directory / REPORT, page)


# -- names ---------------------------------------------------------------------------------------


def _stem(name: str) -> str:
    return next(name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix))


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
