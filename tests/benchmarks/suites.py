"""The suites: which command measures, and which of its numbers are kept as figures."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from typing import Any

from tests.benchmarks.figures import FaultKind, Figure
from tests.gallery.entries import CHECKOUT
from tests.gallery.watched import Say, run_watched
from tests.made_page import EntryFailed
from tests.research.peers.runs import SUCCESS

HOSTS = (1, 3)
TRAJECTORIES = (512, 2048)
SEEDS = 2
LAYERS = 8
"""Of 28 of Qwen3-1.7B: 0.7 billion parameters fit into the memory of a small machine."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a suite measured."""

    figures: Sequence[Figure] = ()
    faults: Sequence[FaultKind] = ()
    checks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Suite:
    """Some figures that one command measures."""

    name: str
    title: str
    command: str
    """What a reader types to measure it alone; ``{out}`` is a folder."""
    read: Callable[[str, Path], Result]
    """Reads standard output, and what lies in the folder."""
    about: str
    """Sentences of the page, under the title."""
    tolerates: tuple[int, ...] = (0,)
    """Exit statuses after which there are results."""


def measure(suite: Suite, say: Say) -> Result:
    """Run the command of a suite, and tell now and then what it says.

    Raises:
        EntryFailed: it failed, or took too long.
    """
    out = Path(tempfile.mkdtemp(prefix="libra-benchmark-"))
    program, *words = shlex.split(suite.command.format(out=out))
    log, errors = out / "stdout.log", out / "stderr.log"
    command = [str(Path(sys.executable).with_name(program)), *words]
    try:
        status = run_watched(command, cwd=CHECKOUT, log=log, errors=errors, say=say)
    except TimeoutError as error:
        raise EntryFailed(f"{error}\nnext: see {out}") from None
    said = log.read_text(encoding="utf-8")
    if status not in suite.tolerates:
        end = (said + errors.read_text(encoding="utf-8"))[-1500:]
        raise EntryFailed(f"{suite.command.format(out=out)} ended with {status}:\n{end}")
    result = suite.read(said, out)
    if status:
        say(f"  not all is as it should be: see {out}")
    else:
        rmtree(out)
    return result


def _speed(stdout: str, out: Path) -> Result:
    rows = json.loads((out / "speed.json").read_text(encoding="utf-8"))["speed"]
    return Result(
        [
            Figure(
                what=row["what"],
                value=row["number"],
                unit=row["unit"],
                less_is_better=not row["unit"].startswith("1/"),
            )
            for row in rows
        ]
    )


def _load(stdout: str, out: Path) -> Result:
    header, *rows = stdout.strip().splitlines()
    names = [name.strip() for name in header.split("  ") if name.strip()]
    figures: list[Figure] = []
    for row in rows:
        told = dict(zip(names, row.split(), strict=True))
        many = f"{int(told['trajectories']):,} trajectories"
        turns = Figure(
            what=f"{many}: turns through the controller",
            value=float(told["turns/s"]),
            unit="turns/s",
            less_is_better=False,
        )
        cpu = Figure(
            what=f"{many}: CPU of the controller", value=float(told["CPU ms/turn"]), unit="ms/turn"
        )
        lag = Figure(
            what=f"{many}: lag of its event loop, P99",
            value=float(told["P99 ms"]),
            unit="ms",
            noise=0.5,
        )
        figures += [turns, cpu, lag]
    return Result(figures)


def _sync(stdout: str, out: Path) -> Result:
    rows = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    ways = {"": "libra", "fabric_": "a process group", "raw_": "plain sockets, nothing checked"}
    return Result(
        [
            Figure(
                what=f"{row['hosts']} host{'s' if row['hosts'] > 1 else ''}, all together: {words}",
                value=row[f"{way}all_mb_s"],
                unit="MB/s",
                less_is_better=False,
            )
            for row in rows
            for way, words in ways.items()
        ]
    )


def _publication(stdout: str, out: Path) -> Result:
    told: Mapping[str, Any] = json.loads(stdout.strip().splitlines()[-1])
    size = f"{told['parameters'] / 1e9:.2f} billion parameters"
    names = {"still": "the trainer copies, a thread writes", "before": "the trainer writes itself"}
    return Result(
        [
            Figure(what=f"{size}: {words}", value=median, unit="s")
            for name, words in names.items()
            for median in [told["seconds"][name][len(told["seconds"][name]) // 2]]
        ]
    )


def _memory(stdout: str, out: Path) -> Result:
    off = [abs(float(row["law"]) / float(row["counted"]) - 1) for row in json.loads(stdout)]
    return Result(
        [
            Figure(what=f"off by, {what} of {len(off)}", value=100 * value, unit="%", noise=0.1)
            for what, value in (("mean", fmean(off)), ("most", max(off)))
        ]
    )


def _regret(stdout: str, out: Path) -> Result:
    return Result(
        [
            Figure(
                what=f"{row['trace']}, {row['variant']}: from the {row['start']} start",
                value=100 * (1 - row["regret"]),
                unit="%",
                less_is_better=False,
                noise=0.01,
            )
            for row in json.loads(stdout)["regret"]
        ]
    )


def _peers(stdout: str, out: Path) -> Result:
    rows: list[dict[str, Any]] = json.loads((out / "peers.json").read_bytes())["peers"]
    return Result(
        [
            figure
            for contender in dict.fromkeys(row["contender"] for row in rows)
            for figure in _contender([row for row in rows if row["contender"] == contender])
        ]
    )


def _contender(rows: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield seconds a step, and until a run has learned, in the mean of those that have."""
    name = rows[0]["contender"]
    steps = fmean(row["step_s"] for row in rows)
    yield Figure(what=f"{name}: a step, mean of {len(rows)} seeds", value=steps, unit="s")
    learned = [row["success_s"] for row in rows if row["success_s"] is not None]
    if learned:
        what = f"{name}: until its success was {SUCCESS}, {len(learned)} of {len(rows)} seeds"
        yield Figure(what=what, value=fmean(learned), unit="s")


def _chaos(stdout: str, out: Path) -> Result:
    told: Mapping[str, list[float | None]] = json.loads((out / "result.json").read_bytes())
    after = stdout.partition("bytes a step")[2].splitlines()
    checks = [line for line in after if line.startswith(("VIOLATED", "invariants", "left on"))]
    return Result(faults=[*_kinds(told)], checks=checks)


def _kinds(told: Mapping[str, list[float | None]]) -> Iterator[FaultKind]:
    for kind, seconds in told.items():
        known = [round(one, 1) for one in seconds if one is not None]
        if seconds:
            yield FaultKind(kind=kind, seconds=known, not_recovered=len(seconds) - len(known))


SUITES: Mapping[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "chaos",
            "Faults, and seconds until a run has recovered",
            "python -m tests.cluster.chaos --minutes 15 --seed 0 --directory {out}",
            _chaos,
            "A real run (vLLM, accelerate, SSH, a small model) on three hosts in network namespaces"
            " of one machine; faults come in a seeded order, sometimes two at once. A run has"
            " recovered when every host is ready, every slot serves or trains and a step has ended"
            " since the fault was over; the seconds count from the injection, so a fault that lasts"
            " takes at least as long. Afterwards the journal is searched for trajectories that were"
            " not trained once and for other broken invariants, and hosts for what was left.",
            tolerates=(0, 1),
        ),
        Suite(
            "decisions",
            "Planning and scheduling",
            "python -m tests.research.speed --json {out}/speed.json",
            _speed,
            "On one core each, and the simulator on all, on a recorded trace.",
        ),
        Suite(
            "load",
            "Turns through one controller",
            f"python -m tests.load --trajectories {' '.join(map(str, TRAJECTORIES))} --seconds 15",
            _load,
            "Real controller, agents, journal and SSH; servers that answer at once, on the same"
            " cores, so that the controller is what is measured.",
        ),
        Suite(
            "sync",
            "Weight versions to hosts",
            f"python -m tests.research.sync --bytes 1e9 --hosts {' '.join(map(str, HOSTS))}",
            _sync,
            "1 GB of random weights to hosts in network namespaces of one machine, whose cores all"
            " of them share: over TLS with checksums, over a process group, and over plain sockets"
            " that check nothing.",
        ),
        Suite(
            "publication",
            "How long the trainer stands still for a version",
            f"python -m tests.research.weight_publication {LAYERS} /dev/shm/libra-publication",
            _publication,
            f"The shapes of {LAYERS} of Qwen3-1.7B's 28 layers and of its embedding.",
        ),
        Suite(
            "peers",
            "Seconds a step, and until it has learned, beside TRL",
            f"python -m tests.research.peers recipes/quickstart.yaml --seeds {SEEDS}"
            " --json {out}/peers.json",
            _peers,
            "The quickstart by libra and by TRL's GRPOTrainer with its own tool loop, one after the"
            " other: median seconds of a step, and seconds from launch.",
        ),
        Suite(
            "memory",
            "The memory that the planner reckons with, beside what torch counts",
            "python -m tests.research.memory_law",
            _memory,
            "Bytes of a rank at the worst moment of a step by the planner's law, and by torch's"
            " memory tracker on the trainer's own code, with fake tensors: Qwen3 of 0.6 to 32"
            " billion parameters, four layers of true width, on 1 and 8 ranks, checkpointed.",
        ),
        Suite(
            "regret",
            "The throughput of libra's plans, of that of the best static one in hindsight",
            "libra bench regret --trace taubench --gpus 24 --drift 'none 1,4' --seeds 3 --out {out}"
            " --json -",
            _regret,
            "In the simulator, a run of 24 steps from four starts: libra's own plan, that of a"
            " recipe that says no lengths, half of the GPUs, and the worst of those tried.",
        ),
    )
}
"""By name, in the order of the page."""
