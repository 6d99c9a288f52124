"""A real vLLM server and a real trainer with images: a run of two steps, and what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from libra_cli.runtime.store.images import IMAGES, read_places
from tests.live import CHECKOUT, START_S, STEP_S, Live, live, require
from tests.vision import IMAGE, teach_letters, write_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),
]
require("vllm")
STEPS, GROUPS, GROUP_SIZE = 2, 2, 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    write_model(directory)
    return directory


def recipe(model_dir: Path, work: Path, *, environment: str, max_len: int) -> dict[str, Any]:
    local = {"host": "local", "slots": 2, "pool": ["rollout", "train"], "workdir": str(work)}
    return {
        "run": {"name": "seeing", "seed": 0},
        "nodes": [local | {"python": sys.executable}],
        "model": {"path": str(model_dir), "dtype": "float32", "max_len": max_len, "images": True},
        "environment": {"name": f"tests.vision:{environment}"},
        "rollout": {},
        "training": {
            "learning_rate": 1e-3,
            "micro_batch_tokens": 2048,
            "scale_rewards": "none",
            "betas": [0.9, 0.95],
        },
    }


@pytest.fixture(scope="module")
def run(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Live:
    """It has ended."""
    base = tmp_path_factory.mktemp("run")
    document = recipe(model_dir, base / "work", environment="Squares", max_len=96)
    document["run"]["steps"] = STEPS
    document["rollout"] |= {"group_size": GROUP_SIZE, "max_turns": 3, "max_turn_tokens": 12}
    document["training"]["groups_per_step"] = GROUPS
    with live(yaml.safe_dump(document), base / "run", base / "home") as started:
        status = started.process.wait(timeout=START_S + STEPS * STEP_S)
        assert status == 0, started.told()
        return started


def test_versions_with_their_tower_are_proved_and_both_models_see_the_same(run: Live) -> None:
    ((proved, newest, gap),) = run.query("SELECT min(verified), max(version), max(gap) FROM syncs")
    assert proved == 1
    assert newest >= STEPS - 1, "nobody plays with the last one"
    assert gap < 1e-3
    gaps = run.query("SELECT logprob_gap FROM steps WHERE logprob_gap IS NOT NULL")
    assert gaps
    assert max(gap for (gap,) in gaps) < 1e-3


def told(what: str, model_dir: Path) -> Any:
    """What the functions of ``tests.vision`` return, in a process of their own."""
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCH_COMPILE_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.vision", what, str(model_dir)],
        capture_output=True,
        text=True,
        timeout=START_S,
        cwd=CHECKOUT,
        env=os.environ | own,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_turn_whose_image_was_cached_goes_on_when_a_load_drops_the_cache(model_dir: Path) -> None:
    alone, interrupted = told("turns", model_dir)
    assert len(alone) == 40
    assert interrupted == alone


def test_prompts_are_those_of_transformers_processor_and_of_vllms(model_dir: Path) -> None:
    ours, transformers, vllm = told("compare", model_dir)
    assert ours["ids"] == transformers["ids"] == vllm["ids"]
    assert ours["places"] == vllm["places"] == [[7, 4], [13, 3], [33, 4]]


def test_each_image_is_kept_once_and_where_it_stood(run: Live) -> None:
    places = read_places(run.run_dir)
    kept = {one.name for images in places.values() for one in images}
    files = {path.stem for path in (run.run_dir / IMAGES).glob("*.png")}
    assert kept == files
    assert len(kept) == 6, "three colours, two sizes"
    first, second = max(places.values(), key=len)
    assert (first.tokens, second.tokens) == (4, 3)
    shown = run.libra("show", str(run.run_dir), "--longest")
    assert shown.returncode == 0, shown.stderr
    assert "[image 64x64 " in shown.stdout
    assert "<|image_pad|><|image_pad|>" not in shown.stdout


def test_the_export_has_a_new_language_model_and_the_same_tower(run: Live, model_dir: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    ((path,),) = run.query("SELECT path FROM exports")
    before = load_file(model_dir / "model.safetensors")
    after: dict[str, Any] = {}
    for file in Path(path).glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys()
    tower = {name for name in before if ".visual." in name}
    moved = {name for name in before if not before[name].equal(after[name])}
    assert tower
    assert not moved & tower
    assert "lm_head.weight" in moved
    for name in ("preprocessor_config.json", "tokenizer.json"):
        assert (Path(path) / name).read_bytes() == (model_dir / name).read_bytes()
    model = AutoModelForImageTextToText.from_pretrained(path)
    assert (
        type(model).__name__
        == json.loads((model_dir / "config.json").read_text())["architectures"][0]
    )
    assert model.config.image_token_id == IMAGE


@pytest.mark.nightly
def test_a_model_that_names_colours_blindly_learns_to_look(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_model(model_dir)
    teach_letters(model_dir)
    document = recipe(model_dir, tmp_path / "work", environment="Letters", max_len=96)
    document["run"]["steps"] = 40
    document["rollout"] |= {"group_size": 8, "max_turns": 1, "max_turn_tokens": 2}
    document["training"]["groups_per_step"] = 9
    with live(yaml.safe_dump(document), tmp_path / "run", tmp_path / "home") as started:
        assert started.process.wait(timeout=START_S + STEP_S) == 0, started.told()
        rewards = [one for (one,) in started.query("SELECT reward FROM steps ORDER BY step")]
    assert sum(rewards[:5]) / 5 < 0.45, "a third is what who does not look gets"
    assert sum(rewards[-5:]) / 5 > 0.8
