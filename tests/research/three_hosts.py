"""The quickstart on three hosts over SSH, of which one loses its power in the middle.

    python -m tests.research.three_hosts --out hosts

The hosts are network namespaces of this machine (``tests.netns``), whose cores they share: two
serve and one trains. Half of the steps later a host that serves is off for some seconds and boots
again, with what was on its disk. At the end it prints what came and writes ``three-hosts.svg``: the
reward over time, and below it what every slot did. Needs root.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import yaml

from libra_cli.api import load_run
from tests.cluster.cluster import Cluster, cluster
from tests.gallery.facts import Curve, ServerKill, Timeline, curve_of
from tests.gallery.fault import Killer, timeline_of
from tests.gallery.picture import slots
from tests.live import CHECKOUT
from tests.made_page import say

STEPS = 60
REBOOT_AFTER = STEPS // 2
OFF_S = 5.0
NAMES = ("node-1", "node-2", "node-3")
REBOOTED = 1
"""The place of the host that is switched off: one that serves."""
LIMIT_S = 900.0
"""Seconds that a run may take, also on a busy machine."""


def main() -> None:
    """Run it, and write what came."""
    parser = ArgumentParser(description="The quickstart on three hosts, of which one is rebooted.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    out: Path = parser.parse_args().out
    curve, known, reboot = played(out.resolve())
    away = reboot.serves_again_at - reboot.at
    sys.stdout.write(
        f"{STEPS} steps in {curve.ended_at[-1]:.0f} s, reward {curve.values[0]:.2f} to "
        f"{curve.values[-1]:.2f}; {reboot.slot} served again after {away:.0f} s\n"
    )
    (out / "three-hosts.svg").write_text(slots(curve, known), encoding="utf-8")


def played(directory: Path) -> tuple[Curve, Timeline, ServerKill]:
    """Return the rewards of a run on three hosts, what every slot did in it, and the reboot."""
    with cluster(len(NAMES), directory) as c:
        run = c.run(recipe_of(c))
        run.wait_step(REBOOT_AFTER, timeout_s=LIMIT_S)
        at = time.time()
        c.reboot(c.hosts[REBOOTED], off_s=OFF_S)
        status = run.process.wait(LIMIT_S)
        if status:
            raise SystemExit(f"libra run ended with {status}: tail {run.log}")
        loaded = load_run(run.run_dir)
        killed = Killer(directory, say, f"{c.hosts[REBOOTED].address}/0", at)
        told = timeline_of(loaded, killed).model_dump_json()
        for host, name in zip(c.hosts, NAMES, strict=True):
            told = told.replace(f'"{host.address}/', f'"{name}/')
    known = Timeline.model_validate_json(told)
    assert known.kill is not None, "timeline_of refuses a run without"
    how = {"how": f"gone: its host is off for {OFF_S:.0f} s"}
    reboot = known.kill.model_copy(update=how)
    return curve_of(loaded, "reward/mean"), known.model_copy(update={"kill": reboot}), reboot


def recipe_of(c: Cluster) -> dict[str, Any]:
    """Return the quickstart's recipe on the hosts of a cluster."""
    text = (CHECKOUT / "recipes/quickstart.yaml").read_text(encoding="utf-8")
    recipe: dict[str, Any] = yaml.safe_load(text)
    recipe["nodes"] = c.nodes("rollout", "rollout", "train")
    recipe["run"] |= {"name": "three-hosts", "steps": STEPS}
    return recipe


if __name__ == "__main__":
    main()
