"""``libra tinker``, and loops that use the SDK as it is published (``tests.tinker_client``)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import CHECKOUT, LIBRA, START_S, require

pytestmark = [
    pytest.mark.integration,
    pytest.mark.alone,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]
require("vllm")
require("tinker")

RECIPE = Path(__file__).parents[2] / "recipes/quickstart.yaml"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[dict[str, str]]:
    """What ``libra tinker`` prints; afterwards it is stopped by Ctrl-C."""
    here = tmp_path_factory.mktemp("tinker")
    (here / ".libra").mkdir()
    (here / ".libra/models").symlink_to(models)
    log = here / "log"
    with (
        log.open("w") as told_to_user,
        subprocess.Popen(
            [*LIBRA, "tinker", str(RECIPE)],
            cwd=here,
            env={**os.environ, "HOME": str(here), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=told_to_user,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline().strip() for _ in range(3)]
            told = dict(line.removeprefix("export ").split("=", 1) for line in lines[:2] if line)
            assert len(told) == 2, log.read_text()
            yield {**told, "base_model": lines[2].removeprefix("base model: "), "here": str(here)}
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=START_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    "loop",
    [
        "two_clients_train_sample_save_and_load",
        "a_loop_of_importance_sampling_raises_what_it_rewards",
        "nobody_is_answered_without_the_key_and_what_is_wrong_is_said",
    ],
)
def test_loops_of_the_sdk_find_what_they_expect(service: dict[str, str], loop: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tinker_client", loop, service["base_model"]],
        cwd=CHECKOUT,
        env={**os.environ, **service},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_clients_have_saved_lies_where_the_page_says(service: dict[str, str]) -> None:
    saved = Path(service["here"], "tinker-weights").glob("*/weights/one/adapter_model.safetensors")
    assert len(list(saved)) == 1
