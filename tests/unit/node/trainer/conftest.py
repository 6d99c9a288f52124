"""The small model that trainers of these tests train."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # They import torch, which tests of this folder without a trainer do not need.
    from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
    from libra_cli.node.model.warmup import POSITIONS, new_model

    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0, width=64).save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory
