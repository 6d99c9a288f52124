"""The torchvision that a server of text has where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from libra_cli.node.rollout import torchvision_names

USE = """
from torchvision.io import decode_jpeg
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
assert InterpolationMode.BICUBIC.value == "bicubic"
try:
    functional.resize(None)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def provided(base: Path, **config: object) -> str:
    (base / "config.json").write_text(json.dumps(config))
    before = [*sys.path]
    torchvision_names.provide(base)
    (place,) = [one for one in sys.path if one not in before] or [""]
    return place


def test_its_names_can_be_imported_and_whoever_calls_one_is_told(tmp_path: Path):
    place = provided(tmp_path, text_config={}, vision_config={})
    assert os.environ["PYTHONPATH"] == f"/before{os.pathsep}{place}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", USE], capture_output=True, text=True, check=True, timeout=60
    )
    assert "names alone" in done.stdout


def test_a_model_of_text_gets_none(tmp_path: Path):
    assert provided(tmp_path, model_type="qwen3") == ""


def test_one_that_is_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert provided(tmp_path, text_config={}) == ""
