"""The job that is disturbed: the quickstart's, on hosts of a cluster, as quick as it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.cluster.cluster import Cluster
from tests.live import CHECKOUT

LEASE_S = 20.0
"""A host that is silent for so long is given up: short, so that this is reached often."""
MANY = 1_000_000
"""More steps than any campaign lasts."""
WARM_STEPS = 350
"""The quickstart's."""
MODELS = Path("~/.libra/models")
"""Where the quickstart keeps its model, which takes two minutes to build."""


def recipe_of(c: Cluster, *, warm_steps: int = WARM_STEPS) -> dict[str, Any]:
    """All hosts but the last one serve, of which one can change sides, and the last one trains.
    Tools take a moment, in which processes that start find the cores free."""
    document: dict[str, Any] = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["run"] = {"name": "chaos", "steps": MANY, "lease_s": LEASE_S, "samples": 0}
    document["nodes"] = c.nodes(*["rollout"] * (len(c.hosts) - 2), "hybrid", "train")
    document["environment"]["args"] = {"latency_s": 0.1}
    document["rollout"] |= {"group_size": 4, "max_turns": 12}
    document["rollout"]["buckets"] = [{"name": "all", "max_num_seqs": 16}]
    document["training"] |= {
        "groups_per_step": 4,
        "checkpoint_every": 5,
        "export": {"at_end": []},
    }
    document["model"]["build"]["warm_steps"] = warm_steps
    document["planner"] = {"kind": "fixed"}
    return document


def with_fake_servers(document: dict[str, Any]) -> dict[str, Any]:
    """The same on servers that compute nothing: for what has nothing to do with vLLM, nor with what
    the model has learned."""
    talk = {"name": "tests.load.talk:Talk", "args": {"most_turns": 8, "pause_s": 0.2}}
    rollout = document["rollout"] | {"backend": "tests.load.backend:AtOnce"}
    # They hold no model, so the probe proves nothing.
    return document | {
        "environment": talk,
        "rollout": rollout,
        "weight_sync": {"tolerance": 1e6},
    }


def share_models(c: Cluster, models: Path) -> None:
    """Keep the hosts' models in one directory, from one run to the next."""
    models.mkdir(parents=True, exist_ok=True)
    for host in c.hosts:
        (c.net.machine(host).path(host.disk) / "models").symlink_to(models)
