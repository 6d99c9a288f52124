"""The small model that comes with libra is what its code would make."""

from __future__ import annotations

import json
import random
from pathlib import Path

from transformers import AutoModelForCausalLM

from libra_cli.config.recipe import ModelBuild
from libra_cli.node.model import warmup
from libra_cli.node.model.build import build_hash, provide
from libra_cli.node.model.tokenizer import PAD, build_tokenizer, save_tokenizer, token_id
from libra_cli.runtime.hosts.shipped_model import ShippedModel, shipped_model
from tests.shipped_model import MAKE, SHIPPED

LOSS = (0.10, 0.20)
"""Nats a token of the expert, who is not certain himself, of the trained model."""


def shipped() -> ShippedModel:
    found = shipped_model(ModelBuild())
    assert found is not None
    return found


def test_it_is_made_by_the_code_that_is_here():
    assert shipped().name == build_hash(ModelBuild()), f"make it anew: {MAKE}"


def test_another_request_is_not_answered_with_it():
    assert shipped_model(None) is None
    assert shipped_model(ModelBuild(seed=1)) is None
    assert shipped_model(ModelBuild(warm_steps=349)) is None


def test_a_host_takes_it_for_one_that_it_has_cached(tmp_path: Path):
    directory = tmp_path / shipped().name
    directory.mkdir()
    for name, data in shipped().files.items():
        (directory / name).write_bytes(data)
    build = ModelBuild().model_dump(mode="json", exclude_none=True)
    answer = provide({"path": None, "build": build, "cache": str(tmp_path)})
    assert answer["model_dir"] == str(directory)
    assert answer["success"] == json.loads(shipped().files["libra.json"])["success"]


def test_its_tokenizer_is_the_one_that_is_built(tmp_path: Path):
    save_tokenizer(build_tokenizer(), tmp_path, max_len=warmup.POSITIONS)
    for file in tmp_path.iterdir():
        assert (SHIPPED / file.name).read_bytes() == file.read_bytes()


def test_its_weights_have_learned_the_game():
    tokenizer, rng = build_tokenizer(), random.Random("games that it was not shown")
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    played = [warmup._demonstration(tokenizer, rng) for _ in range(warmup.BATCH * 2)]
    untrained = warmup.new_model(tokenizer, seed=0)
    pad = token_id(tokenizer, PAD)
    assert warmup._step(untrained, played, pad) > 3
    assert LOSS[0] < warmup._step(model, played, pad) < LOSS[1]
