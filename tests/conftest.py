"""What every test shares: hypothesis profiles, and the model that real runs build."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from libra_cli.config.recipe import ModelBuild
from libra_cli.runtime.hosts.shipped_model import shipped_model

# Tests keep modules, not garbage, and going through all of them again is a seventh of their time.
gc.set_threshold(100_000, 50, 50)

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=100,
    # Time says more about the machine than about the code.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# For `make check`. `make nightly` has four times as many examples.
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=25)
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=2000)
# For an hour of nonsense at every boundary: HYPOTHESIS_PROFILE=fuzz pytest tests/unit/fuzz
settings.register_profile(
    "fuzz",
    parent=settings.get_profile("ci"),
    derandomize=False,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "20000")),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where hosts keep the models that they build: all runs that ask for the same one have it from
    the first of them, and the quickstart's comes with libra."""
    directory = tmp_path_factory.mktemp("models")
    shipped = shipped_model(ModelBuild())
    assert shipped is not None
    (directory / shipped.name).mkdir()
    for name, content in shipped.files.items():
        (directory / shipped.name / name).write_bytes(content)
    return directory


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what this machine could not show, for want of root, a program or a package."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, number in Counter(map(_why, skipped)).most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}", yellow=True)


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    place = report.longrepr
    reason = place[2] if isinstance(place, tuple) else str(place)
    return reason.removeprefix("Skipped: ")
