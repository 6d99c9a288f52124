"""A real run, with vLLM and a trainer, in which each step's group is played by another client.

    make clients && python -m tests.clients.live_run [strict|position] [CLIENT ...]

prints the table of the clients: how their requests went on with one another, and how far apart the
server's and the trainer's log-probabilities of their tokens are.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from libra_cli.node.model.build import BUILD_TIMEOUT_S
from tests.clients.catalogue import CLIENTS, HOME
from tests.live import CHECKOUT, START_S, STEP_S, Live, live

GROUP_SIZE = 2
MAX_LEN = 32_768
"""Tokens, which are bytes: Claude Code and Codex begin with more than 16,000."""


@dataclass(frozen=True)
class Played:
    """What one client's group came to."""

    client: str
    requests: int
    """Turns that it was answered with."""
    kept: float | None
    """The share of its requests after each trajectory's first that went on with exact tokens."""
    branches: int
    """Sequences, beside the first of each trajectory."""
    gap: float | None
    """Mean difference of log-probabilities between server and trainer, in nats."""
    seconds: float
    """From its first trajectory's beginning to its last one's end."""

    def row(self, own_s: float) -> str:
        """Return a line of the table, beside the seconds that libra's own loop took."""
        kept = "-" if self.kept is None else f"{self.kept:.0%}"
        gap = "-" if self.gap is None else f"{self.gap:.1e}"
        return (
            f"{self.client:24} {self.requests:8} {kept:>6} {self.branches:5} {gap:>9}"
            f" {self.seconds:7.1f} {own_s:7.1f}"
        )


TITLE = "client                   requests   kept forks   gap/nat seconds own loop"


def model_of(base: Path, cache: Path) -> Path:
    """Build the quickstart's model, or find it in ``cache``, and give a copy longer contexts."""
    spec, out = base / "spec.json", base / "out.json"
    build = {"task": "pointer-chase", "seed": 0, "warm_steps": 350}
    spec.write_text(json.dumps({"path": None, "build": build, "cache": str(cache)}))
    command = [sys.executable, "-m", "libra_cli.node.model.build", str(spec), str(out)]
    subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S, cwd=CHECKOUT)
    model = base / "policy"
    shutil.copytree(json.loads(out.read_text())["model_dir"], model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = MAX_LEN
    (model / "config.json").write_text(json.dumps(config))
    return model


def recipe_text(
    base: Path, model: Path, clients: Sequence[str], *, match: str | None, group_size: int
) -> str:
    """The quickstart, a group a step, with the clients as its agents; ``match`` None: own loop."""
    document: dict[str, Any] = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["run"] = {"name": "clients", "steps": len(clients), "lease_s": 60}
    work = base / "work"
    document["nodes"][0] |= {"workdir": str(work), "python": sys.executable}
    document["model"] = {"path": str(model), "max_len": MAX_LEN}
    document["environment"]["args"] = {"failure_rate": 0.0}
    document["rollout"]["group_size"] = group_size
    document["training"] |= {
        "groups_per_step": 1,
        "max_staleness": 0,
        "micro_batch_tokens": MAX_LEN,
        "checkpoint_every": 1000,
    }
    if match is not None:
        document["agent"] = {
            "command": [sys.executable, "-m", "tests.clients.dispatch"],
            "env": {
                "PYTHONPATH": str(CHECKOUT),
                "LIBRA_CLIENTS": str(HOME),
                "LIBRA_TEST_CLIENTS": "\n".join(clients),
            },
            "match": match,
            "max_branches": 32,
            "timeout_s": 300,
        }
    return yaml.safe_dump(document)


def played(run: Live, clients: Sequence[str]) -> list[Played]:
    """Read of each group what it came to, when the run has trained them all."""
    run.wait_step(len(clients), timeout_s=START_S + STEP_S * len(clients))
    gaps = dict(run.query("SELECT group_id, logprob_gap FROM groups JOIN steps USING (step)"))
    found = []
    for group, name in enumerate(clients):
        rows = run.query(
            "SELECT turns, branches_json, started_at, ended_at FROM trajectories"
            f" WHERE group_id = {group} AND state = 'finished'"
        )
        turns = sum(row[0] for row in rows)
        forks = sum(len(json.loads(row[1])) for row in rows)
        later = turns - len(rows)
        found.append(
            Played(
                name,
                turns,
                (later - forks) / later if later else None,
                forks,
                gaps.get(group),
                max(row[3] for row in rows) - min(row[2] for row in rows),
            )
        )
    return found


def main() -> None:
    """Print the table."""
    match, *names = sys.argv[1:] or ["strict"]
    clients = names or [client.name for client in CLIENTS]
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        model = model_of(base, HOME / "models")
        own = recipe_text(base, model, clients, match=None, group_size=GROUP_SIZE)
        with live(own, base / "own", Path.home()) as run:
            beside = [one.seconds for one in played(run, clients)]
        text = recipe_text(base, model, clients, match=match, group_size=GROUP_SIZE)
        print(TITLE)
        with live(text, base / "agents", Path.home()) as run:
            for one, own_s in zip(played(run, clients), beside, strict=True):
                print(one.row(own_s))


if __name__ == "__main__":
    main()
