"""libra beside the trainer that others would pick instead, on the same machine and the same task.

Every contender gets the same model, tasks, groups, limits and optimizer, from the recipe; they run
one after the other, each in processes of its own with all cores of the machine, so nothing else
should. Its batch rule, its scheduler and its own way to serve the policy are a contender's own:
libra trains behind rollout (``training.max_staleness``), TRL in turns with it.

TRL's half is ``tests.research.peers.trl_grpo``. It needs ``trl``, which the extra ``test`` has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import yaml

from libra_cli.bench.config import Progress
from libra_cli.bench.results import Interval, interval
from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run

WARM_STEPS = 3
"""Steps at the beginning that are not counted into the seconds of one: caches fill, queues too."""
SUCCESS, SMOOTHED = 0.7, 5
"""Learning has come this far when the mean reward of the last ``SMOOTHED`` steps is ``SUCCESS``."""
TIMEOUT_S = 3600.0
CONTENDERS = ("libra", "trl")


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One run. Seconds are of wall clock; None if the run was too short to tell."""

    contender: str
    latency_s: float
    seed: int
    step_s: float | None
    """Median seconds from the end of a step to the end of the next."""
    first_s: float
    """From launch to the end of the first step."""
    success_s: float | None
    """From launch until it had learned as much as ``SUCCESS`` says."""
    reward: float
    """Mean over the last ``SMOOTHED`` steps."""
    area: float
    """Mean over all steps."""
    by_policy: float
    """Mean over the versions of the policy that generated, all but the last."""
    rewards: Sequence[float]
    """Of every step, the mean of its batch."""


@dataclass(frozen=True, slots=True)
class PeerDifference:
    """libra's number less its peer's, in the mean over the seeds that both ran."""

    latency_s: float
    number: str
    seeds: int
    mean: float
    ci95: Interval | None


def differences(rows: Sequence[PeerRow]) -> list[PeerDifference]:
    """What libra learned more than its peer, paired by seed; none where only one of them ran."""
    found = {(row.contender, row.latency_s, row.seed): row for row in rows}
    told = []
    for latency_s in sorted({row.latency_s for row in rows}):
        pairs = [
            (row, found["trl", latency_s, row.seed])
            for row in rows
            if (row.contender, row.latency_s) == ("libra", latency_s)
            and ("trl", latency_s, row.seed) in found
        ]
        for number in ("reward", "area", "by_policy") if pairs else ():
            values = [getattr(ours, number) - getattr(theirs, number) for ours, theirs in pairs]
            told.append(
                PeerDifference(latency_s, number, len(pairs), fmean(values), interval(values))
            )
    return told


@dataclass(frozen=True, slots=True)
class _Played:
    began: float
    steps: Sequence[tuple[float, float, float]]
    """When each step ended, its mean reward, and the mean version that generated its tokens."""


def peers(
    recipe: Path,
    *,
    latencies: Sequence[float],
    seeds: Sequence[int],
    steps: int,
    contenders: Sequence[str] = CONTENDERS,
    progress: Progress,
) -> list[PeerRow]:
    """Run them all.

    Raises:
        LibraError: the recipe does not fit, or a run failed.
    """
    if foreign := set(contenders) - set(CONTENDERS):
        raise LibraError(
            f"there is no contender {', '.join(sorted(foreign))}",
            hint=f"--contenders {','.join(CONTENDERS)}",
        )
    plan = load_recipe(recipe)
    if plan.environment_labels != ("pointer-chase",) or plan.model.build is None:
        raise LibraError(
            f"{recipe}: both must play pointer-chase with a model that is built",
            hint="python -m tests.research.peers recipes/quickstart.yaml",
        )
    rows = []
    with tempfile.TemporaryDirectory(prefix="libra-peers-") as name:
        model_dir = _built(plan, Path(name))
        for latency_s in latencies:
            for seed in seeds:
                for contender in contenders:
                    progress(f"{contender}, tools of {latency_s:g} s, seed {seed}")
                    place = Path(name) / f"{contender}-{latency_s}-{seed}"
                    if contender == "libra":
                        played = _libra(recipe, place, latency_s, seed, steps)
                    else:
                        played = _trl(plan, model_dir, place, latency_s, seed, steps)
                    rows.append(_row(contender, latency_s, seed, played))
    return rows


def _row(contender: str, latency_s: float, seed: int, played: _Played) -> PeerRow:
    ends = [at for at, _, _ in played.steps]
    rewards = [reward for _, reward, _ in played.steps]
    versions = [version for _, _, version in played.steps]
    apart = [after - before for before, after in pairwise(ends[WARM_STEPS:])]
    smooth = [fmean(rewards[end - SMOOTHED : end]) for end in range(SMOOTHED, len(rewards) + 1)]
    reached = next((at for at, mean in enumerate(smooth) if mean >= SUCCESS), None)
    return PeerRow(
        contender,
        latency_s,
        seed,
        step_s=median(apart) if apart else None,
        first_s=ends[0] - played.began,
        success_s=None if reached is None else ends[reached + SMOOTHED - 1] - played.began,
        reward=fmean(rewards[-SMOOTHED:]),
        area=fmean(rewards),
        by_policy=float(np.interp(range(len(rewards) - 1), versions, rewards).mean()),
        rewards=rewards,
    )


def _built(plan: Recipe, place: Path) -> str:
    assert plan.model.build is not None
    order, answer = place / "model-order.json", place / "model.json"
    cache = Path("~/.libra/models").expanduser()
    build = plan.model.build.model_dump(mode="json")
    order.write_text(json.dumps({"path": None, "build": build, "cache": str(cache)}))
    _run([sys.executable, "-m", "libra_cli.node.model.build", str(order), str(answer)], place)
    return str(json.loads(answer.read_text())["model_dir"])


def _libra(recipe: Path, place: Path, latency_s: float, seed: int, steps: int) -> _Played:
    text = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    text["run"] |= {"steps": steps, "seed": seed, "directory": str(place)}
    text["training"]["checkpoint_every"] = steps
    text["environment"]["args"] = {"latency_s": latency_s}
    place.mkdir(parents=True)
    changed = place / "recipe.yaml"
    changed.write_text(yaml.safe_dump(text), encoding="utf-8")
    start = "from libra_cli.cli.main import main; main()"
    began = _run([sys.executable, "-c", start, "run", str(changed)], place)
    with Reader(newest_run(place)) as reader:
        played = [
            (step.ended_at, step.reward, number - step.staleness_mean)
            for number, step in enumerate(reader.steps())
        ]
    return _Played(began, played)


def _trl(
    plan: Recipe, model_dir: str, place: Path, latency_s: float, seed: int, steps: int
) -> _Played:
    place.mkdir(parents=True)
    out = place / "steps.jsonl"
    order: dict[str, Any] = {
        "model_dir": model_dir,
        "steps": steps,
        "seed": seed,
        "latency_s": latency_s,
        "groups": plan.training.groups_per_step,
        "group_size": plan.rollout.group_size,
        "max_turns": plan.rollout.max_turns,
        "max_turn_tokens": plan.rollout.max_turn_tokens,
        "max_len": plan.model.max_len,
        "learning_rate": plan.training.learning_rate,
        "betas": plan.training.betas,
        "out": str(out),
    }
    program = [sys.executable, "-m", "tests.research.peers.trl_grpo", json.dumps(order)]
    began = _run(program, place)
    lines: Iterable[dict[str, float]] = map(json.loads, out.read_text().splitlines())
    played = [(line["at"], line["reward"], float(number)) for number, line in enumerate(lines)]
    return _Played(began, played)


def _run(program: Sequence[str], place: Path) -> float:
    """Run a program to its end; return when it began."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    began = time.time()
    done = subprocess.run(program, env=env, capture_output=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip()[-2000:]
        raise LibraError(f"{place.name} ended with code {done.returncode}: {last}")
    return began
