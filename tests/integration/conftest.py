"""What several integration tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where hosts keep the models they build, so that each is built once."""
    return tmp_path_factory.mktemp("models")
