"""The facts of a run that was written by hand."""

from __future__ import annotations

import pytest

from libra_cli.api import load_run
from tests.gallery.facts import Facts, Machine, examination, facts_of
from tests.played import write_played

MACHINE = Machine(
    cpu="Xeon", cores=2, memory_gib=24, gpus=[], load=0.5, versions={"torch": "2"}, commit="abc"
)


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The facts of a run of 41 steps, in whose last trajectory a tool wrote what is hostile."""
    run_dir = write_played(tmp_path_factory.mktemp("gallery") / "runs/quickstart-1")
    found = examination(
        {"pass@1": 0.5, "pass@1/low": 0.4, "pass@1/high": 0.6}, step=None, tasks=64, samples=4
    )
    given = {
        "name": "quickstart",
        "recipe": "recipes/quickstart.yaml",
        "commands": ["libra run recipes/quickstart.yaml"],
        "machine": MACHINE,
        "day": "2026-01-31",
        "whole_s": 187.0,
        "built_model": True,
        "before": None,
        "exported": found,
    }
    return facts_of(load_run(run_dir), given, "reward/mean")
