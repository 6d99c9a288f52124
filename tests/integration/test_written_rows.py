"""The rows that writing ranks get of a model in real shards are all of it, each of them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.ranks import in_world  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]
RANKS = 4
WRITERS = (1, 3, RANKS)


def rows_and_whole(trainer: Trainer, host: Path) -> tuple[dict[int, list[Any]], dict[str, Any]]:
    """What this rank writes if so many do, as name, first row and numbers; and every weight."""
    written = {
        writers: [
            (one.name, one.first or 0, one.tensor.to(trainer.published_dtype).float().numpy())
            for one in trainer.written_weights(writers)
            if not one.is_empty
        ]
        for writers in WRITERS
    }
    return written, {name: one.float().numpy() for name, one in trainer.whole_weights()}


def test_writers_get_every_row_once_however_many_they_are(tmp_path: Path):
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0, width=64).save_pretrained(tmp_path / "model")
    save_tokenizer(tokenizer, tmp_path / "model", max_len=POSITIONS)
    hosts = [tmp_path / name for name in "aabb"]
    ranks = in_world(hosts, tmp_path / "model", rows_and_whole, dtype="bfloat16")
    whole = ranks[0][1]
    for writers in WRITERS:
        found: dict[str, dict[int, Any]] = {name: {} for name in whole}
        for rank, (written, _) in enumerate(ranks):
            assert bool(written[writers]) == (rank < writers)
            for name, first, rows in written[writers]:
                assert first not in found[name]
                found[name][first] = torch.from_numpy(rows)
        for name, parts in found.items():
            together = torch.cat([parts[first] for first in sorted(parts)])
            assert together.equal(torch.from_numpy(whole[name])), (writers, name)
