"""The loops of tinker-cookbook, as it is published, train on ``libra tinker``.

A small model stands in for Qwen3-8B-Base: it lies in a directory of that name, beside the data sets
that the loops load by their names. So nothing is downloaded and no line of the cookbook is changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.live import START_S, require
from tests.tinker_service import ServedTinker, tinker_service

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]
require("vllm")
require("tinker_cookbook")

MODEL = "Qwen/Qwen3-8B-Base"
ANSWERS = (r"\boxed{3}", r"\boxed{4}")
"""Each is one token of the model, so that it is sampled now and then before anything is trained."""
STOP = "\n\nUser:"
"""What the cookbook has base models stop at: a string."""
RECIPE = {
    "run": {"name": "cookbook"},
    "nodes": [{"host": "local", "slots": 2, "pool": ["rollout", "train"]}],
    "environment": {"name": "pointer-chase"},
    "rollout": {"buckets": [{"name": "all", "max_num_seqs": 32}]},
    "training": {"micro_batch_tokens": 4096},
}


def write_model(directory: Path) -> None:
    from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
    from libra_cli.node.model.warmup import POSITIONS, new_model

    directory.mkdir(parents=True)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([*ANSWERS, "User"])
    new_model(tokenizer, seed=0).save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)


def write_data(here: Path) -> None:
    """Conversations with either answer, and questions whose answer is always three."""
    said = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": ANSWERS[n % 2]}]
        for n in range(128)
    ]
    write_rows(here / "HuggingFaceH4/no_robots", [{"messages": one} for one in said])
    asked = [{"question": f"{n}?", "answer": "It is three.\n#### 3"} for n in range(64)]
    write_rows(here / "openai/gsm8k", asked)
    train = [{"split": "train", "path": "train.jsonl"}]
    card = yaml.safe_dump({"configs": [{"config_name": "main", "data_files": train}]})
    (here / "openai/gsm8k/README.md").write_text(f"---\n{card}---\n")


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> None:
    directory.mkdir(parents=True)
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (directory / "train.jsonl").write_text(text)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedTinker]:
    here = tmp_path_factory.mktemp("cookbook")
    write_model(here / MODEL)
    write_data(here)
    recipe = here / "recipe.yaml"
    model = {"path": str(here / MODEL), "max_len": 1024}
    recipe.write_text(yaml.safe_dump({**RECIPE, "model": model}))
    with tinker_service(here, recipe) as serving:
        yield serving


def run_loop(service: ServedTinker, name: str, **settings: object) -> list[dict[str, Any]]:
    """Run a loop of the cookbook to its end, and return what it has logged of each step."""
    here = service.here
    log = here / "logs" / name
    told: Mapping[str, object] = {"model_name": MODEL, "log_path": log, "save_every": 2, **settings}
    done = subprocess.run(
        [sys.executable, "-m", f"tinker_cookbook.recipes.{name}"]
        + [f"{key}={value}" for key, value in told.items()],
        cwd=here,
        env={**os.environ, **service.environment, "HF_HUB_OFFLINE": "1", "HF_HOME": str(here)},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_sl_loop_teaches_and_saves(service: ServedTinker) -> None:
    steps = run_loop(service, "sl_loop", batch_size=16, learning_rate=5e-3, max_length=256)
    losses = [one["train_mean_nll"] for one in steps]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1, losses
    saved = (service.here / "logs/sl_loop/checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(one)["name"] for one in saved] == ["000002", "000004", "000006", "final"]


def test_rl_loop_raises_the_reward_and_goes_on_from_what_it_saved(service: ServedTinker) -> None:
    asked = {
        "batch_size": 4,
        "group_size": 16,
        "learning_rate": 1e-2,
        "max_tokens": 24,
        "loss_fn": "importance_sampling",
    }
    run_loop(service, "rl_loop", **asked, max_steps=3)
    log = service.here / "logs/rl_loop/checkpoints.jsonl"
    saved = log.read_text().splitlines()
    # The loop takes its last checkpoint for the end of the data; the one before is in the midst.
    log.write_text(saved[0] + "\n")
    steps = run_loop(service, "rl_loop", **asked, max_steps=8)
    assert [one["step"] for one in steps] == [0, 1, 2, *range(2, 8)]
    rewards = [one["reward/total"] for one in steps]
    # At this rate a policy is soon better, and on some machines soon after that worse again. One
    # that learns nothing is rewarded like the first three, give or take 0.03.
    assert max(rewards[3:]) > sum(rewards[:3]) / 3 + 0.1, rewards
