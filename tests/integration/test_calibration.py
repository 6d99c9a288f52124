"""A calibration of real servers and a real trainer, and what its prices say of another load."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from statistics import median

import pytest
import yaml

from libra_cli.bench.calibration import survey as calibration
from libra_cli.bench.calibration.profile import profile_of
from libra_cli.bench.calibration.survey import MeasurementBudget, measure
from libra_cli.config.errors import LibraError
from libra_cli.core.costs.loads import ServerLoad
from libra_cli.core.costs.profile import Profile
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.sim.profiles import load_profile
from tests.live import CHECKOUT, require

pytestmark = [
    pytest.mark.integration,
    pytest.mark.alone,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
]
require("vllm")

UNSEEN = ServerLoad(players=6, cached=96, fresh=16, generate=12)
"""Between the sizes that are measured, none of them."""
QUICK = MeasurementBudget(window_s=0.5, rounds=1, every=3)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the host keeps between calibrations: the small model."""
    return tmp_path_factory.mktemp("work")


def a_recipe(base: Path, work: Path) -> Path:
    document = yaml.safe_load((CHECKOUT / "recipes/quickstart.yaml").read_text())
    document["nodes"][0] |= {"workdir": str(work), "python": sys.executable}
    document["rollout"]["buckets"] = [{"name": "all", "max_num_seqs": 16}]
    document["training"]["groups_per_step"] = 4
    path = base / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def left_over(work: Path) -> list[str]:
    """Processes of whatever was started there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(work).encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def predicted_s(profile: Profile, load: ServerLoad) -> float:
    """Seconds of a turn under this load."""
    cost = profile.servers[1].linear()
    prices = (
        cost.step_s,
        cost.sequence_s,
        cost.kv_token_s,
        cost.prefill_token_s,
        cost.prefill_pair_s,
        cost.request_s,
        profile.surroundings.turn_s,
    )
    amounts = load.amounts(cost.chunk_tokens)
    return sum(price * amount for price, amount in zip(prices, amounts, strict=True))


def test_a_calibration_predicts_a_load_it_has_not_seen(tmp_path, work, monkeypatch):
    unseen: list[tuple[ServerLoad, float]] = []
    steady = calibration._Survey._steady

    async def after_an_unseen_load(self, degree, load, **beside_training):
        if not beside_training:
            unseen.append(await steady(self, degree, UNSEEN))
        return await steady(self, degree, load, **beside_training)

    monkeypatch.setattr(calibration._Survey, "_steady", after_an_unseen_load)
    told: list[str] = []
    measured = measure(load_recipe(a_recipe(tmp_path, work)), QUICK, note=told.append)
    assert left_over(work) == []
    assert any("stopping" in line for line in told)
    profile = profile_of(measured)
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    assert load_profile(str(path)) == profile
    assert json.loads(path.read_text())["provenance"]["vllm"].startswith("0.3")
    assert profile.gpu == "CPU"
    assert profile.servers[1].kv_tokens > 100_000
    assert 1.0 <= profile.surroundings.serving_slowdown < 4.0
    ratios = [predicted_s(profile, load) / took_s for load, took_s in unseen]
    # Whatever else runs on these cores slows down single windows, on either side.
    assert median(ratios) == pytest.approx(1.0, abs=0.5), sorted(ratios)


def test_a_failure_while_starting_leaves_nothing(tmp_path, work):
    recipe = load_recipe(a_recipe(tmp_path, work))
    broken = recipe.rollout.model_copy(update={"vllm_args": ("--no-such-flag",)})
    with pytest.raises(LibraError, match="no-such-flag"):
        measure(recipe.model_copy(update={"rollout": broken}), QUICK, note=lambda line: None)
    assert left_over(work) == []


def test_being_cancelled_leaves_nothing(tmp_path, work):
    recipe = load_recipe(a_recipe(tmp_path, work))

    async def stopped_soon():
        task = asyncio.create_task(calibration._measure(recipe, QUICK, lambda line: None))
        await asyncio.sleep(12)
        task.cancel()
        with pytest.raises(LibraError, match="stopped"):
            await task

    asyncio.run(stopped_soon())
    assert left_over(work) == []
