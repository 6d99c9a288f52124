"""What every test shares: hypothesis profiles, and GPU tests only where there is a GPU."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=100,
    # Time says more about the machine than about the code.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# For `make check`. .ci/run has four times as many examples.
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=25)
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is not None:
        return
    skip = pytest.mark.skip(reason="needs a GPU, and nvidia-smi is not here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
