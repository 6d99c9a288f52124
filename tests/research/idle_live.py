"""What servers earn live that take requests while the trainer on their host waits.

    python -m tests.research.idle_live --seeds 0,1,2 --out idle-live

Of each seed two runs on two SSH hosts of this machine (``tests.netns``, so it needs root), one
after the other, and who goes first changes from seed to seed: the first host serves in both; the
second trains, ``alone`` or ``beside`` a server with ``share.serve: when-idle``. Real vLLM and real
training on this machine's CPU, a core for each process: nothing else should work meanwhile, and on
two cores the server beside the trainer has the core that the trainer does not use. A run that is
in ``--out`` and has finished is not done again.

Told are seconds a step after the first ``FIRST`` ones, the share of them that the trainer waited,
the turns that the second host played, and the difference seed by seed, with its 95 % interval.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from statistics import fmean

import yaml

from libra_cli.api import LoadedRun
from libra_cli.bench.results import interval
from libra_cli.core.records import TurnRecord
from libra_cli.runtime.store.reader import Reader
from tests.live import CHECKOUT, LIBRA
from tests.netns import Network, network
from tests.research.elastic import finished, seconds_of

ARMS = ("alone", "beside")
FIRST = 3
"""Steps at the beginning that are not counted: the pipeline fills in them."""
RUN_S = 1800.0
"""Seconds that a run may take at most, with the small model built."""
SHARES = {"rollout": 0.2, "train": 0.3, "serve": "when-idle"}


def recipe_of(arm: str, seed: int, steps: int, net: Network, place: Path) -> dict[str, object]:
    """The quickstart's job on two hosts."""
    document: dict[str, object] = yaml.safe_load(
        (CHECKOUT / "recipes/quickstart.yaml").read_text(encoding="utf-8")
    )
    sides = ({"pool": "rollout"}, {"share": SHARES} if arm == "beside" else {"pool": "train"})
    nodes = [
        {
            "host": host.address,
            "identity": net.identity,
            "python": sys.executable,
            "workdir": str(place / host.name),
            "env": {"OMP_NUM_THREADS": "1"},
            **side,
        }
        for host, side in zip(net.hosts, sides, strict=True)
    ]
    return document | {
        "run": {"name": arm, "seed": seed, "steps": steps, "directory": "runs"},
        "nodes": nodes,
        "planner": {"kind": "fixed"},
    }


def play(arm: str, seed: int, steps: int, out: Path) -> LoadedRun | None:
    """Return the finished run of an arm, which is made if there is none; None if it failed."""
    place = out / f"{arm}-{seed}"
    if (done := finished(place)) is not None:
        return done
    place.mkdir(parents=True, exist_ok=True)
    with network(2, place / "net") as net, (place / "console.log").open("w") as log:
        document = recipe_of(arm, seed, steps, net, out / "hosts")
        (place / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        command = [*LIBRA, "run", "recipe.yaml"]
        home = {**os.environ, "HOME": str(net.home), "PYTHONPATH": str(CHECKOUT)}
        with subprocess.Popen(command, cwd=place, env=home, stdout=log, stderr=log) as started:
            try:
                started.wait(RUN_S)
            finally:
                if started.poll() is None:
                    started.terminate()  # it stops what it has started, and ends
    return finished(place)


def told(run: LoadedRun) -> tuple[float, str]:
    """Mean seconds of a step, and what else there is to say of the run."""
    seconds = [took for step, took in seconds_of(run).items() if step > FIRST]
    trained_s = sum(row.ended_at - row.started_at for row in run.steps if row.step > FIRST)
    second = run.recipe["nodes"][1]["host"]
    with Reader(run.directory) as reader:
        turns = [turn.slot.startswith(f"{second}/") for turn in reader.rows(TurnRecord)]
    waits = 1 - trained_s / sum(seconds)
    words = (
        f"{fmean(seconds):.2f} s a step, of which the trainer waits {waits:.0%}; "
        f"{fmean(turns):.0%} of {len(turns):,} turns played beside it"
    )
    return fmean(seconds), words


def main() -> None:
    parser = ArgumentParser(description="servers beside a waiting trainer, live")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("idle-live"))
    asked = parser.parse_args()
    gains = []
    for place, seed in enumerate(map(int, asked.seeds.split(","))):
        took: dict[str, float] = {}
        for arm in ARMS if place % 2 else ARMS[::-1]:
            run = play(arm, seed, asked.steps, asked.out.resolve())
            if run is None:
                sys.exit(f"{arm}-{seed} did not finish: {asked.out / f'{arm}-{seed}/console.log'}")
            took[arm], words = told(run)
            sys.stdout.write(f"{arm}-{seed}: {words}\n")
            sys.stdout.flush()
        gains.append(took["alone"] / took["beside"] - 1)
        sys.stdout.write(f"seed {seed}: {gains[-1]:+.1%} steps a second\n")
    low, high = interval(gains) or (float("nan"), float("nan"))
    sys.stdout.write(f"{fmean(gains):+.1%} steps a second ({low:+.1%} to {high:+.1%})\n")


if __name__ == "__main__":
    main()
