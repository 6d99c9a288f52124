"""``libra tinker``, and loops that use the SDK as it is published (``tests.tinker_client``)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import CHECKOUT, START_S, require
from tests.tinker_service import ServedTinker, tinker_service

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]
require("vllm")
require("tinker")

RECIPE = Path(__file__).parents[2] / "recipes/quickstart.yaml"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[ServedTinker]:
    here = tmp_path_factory.mktemp("tinker")
    (here / ".libra").mkdir()
    (here / ".libra/models").symlink_to(models)
    with tinker_service(here, RECIPE) as serving:
        yield serving


@pytest.mark.parametrize(
    "loop",
    [
        "two_clients_train_sample_save_and_load",
        "a_loop_of_importance_sampling_raises_what_it_rewards",
        "a_sample_ends_with_the_token_that_completes_a_string",
        "adapters_that_servers_have_let_go_of_are_loaded_again",
        "nobody_is_answered_without_the_key_and_what_is_wrong_is_said",
    ],
)
def test_loops_of_the_sdk_find_what_they_expect(service: ServedTinker, loop: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tinker_client", loop, service.base_model],
        cwd=CHECKOUT,
        env={**os.environ, **service.environment},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_clients_have_saved_lies_where_the_page_says(service: ServedTinker) -> None:
    saved = (service.here / "tinker-weights").glob("*/weights/one/adapter_model.safetensors")
    assert len(list(saved)) == 1


def test_of_clients_that_have_ended_the_host_keeps_no_adapter(service: ServedTinker) -> None:
    """Each loop has ended its session, as the SDK does on leaving a ``with``, or has asked to."""
    unnamed = (service.here / "tinker-weights").glob("*/sampler_weights/*")
    assert list(unnamed) == []
