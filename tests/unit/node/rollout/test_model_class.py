"""A server's first start on a host imports vLLM once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import require
from tests.shipped_model import SHIPPED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
require("vllm")

LOOK = """
import sys
from pathlib import Path
from libra_cli.node.rollout.model_class import register_classes
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

def refused(look):
    raise AssertionError("another process was to be started")

registry._run_in_subprocess = refused
if sys.argv[2] == "registered":
    register_classes(Path(sys.argv[1]))
config = EngineArgs(model=sys.argv[1], dtype="float32").create_model_config()
print(config.architecture, config.is_multimodal_model)
"""


def look(cache: Path, how: str) -> subprocess.CompletedProcess[str]:
    """What a process says that asks vLLM of the shipped model, where nothing is cached yet."""
    return subprocess.run(
        [sys.executable, "-c", LOOK, str(SHIPPED), how],
        env={**os.environ, "VLLM_CACHE_ROOT": str(cache), "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_what_vllm_asks_of_a_class_is_answered_without_another_process(tmp_path: Path) -> None:
    done = look(tmp_path, "registered")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Qwen3ForCausalLM False"


def test_without_it_vllm_starts_one(tmp_path: Path) -> None:
    """When this fails, vLLM has become better, and the module can go."""
    assert "another process was to be started" in look(tmp_path, "as it is").stderr
