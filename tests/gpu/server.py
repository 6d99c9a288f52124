"""A real vLLM server: it loads versions and proves them, and what it says of tokens is compared."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from array import array
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from libra_cli.config.errors import ServerError
from libra_cli.core.actions import Generate
from libra_cli.core.events import TurnGenerated
from libra_cli.core.types import TrajectoryId, WeightVersion
from libra_cli.node.weights.chunks import MANIFEST
from libra_cli.runtime.rollout.connection import Sampling
from libra_cli.runtime.weights.probe_bounds import probe_gap
from tests.gpu.model import Size
from tests.vllm_server import Bench, bench_of, published

SAMPLING = Sampling(temperature=1.0, top_p=1.0, stop_token_ids=(), to_the_end=True)
TURNS, TOKENS = 64, 32
LOAD_S = 120.0


def server(device: str, size: Size, base: Path) -> dict[str, Any]:
    """A server of the model that ``trainer`` has left, with its versions."""
    names = json.loads((base / "names.json").read_text())
    versions = [base / "versions" / name for name in names]
    gpus = 1 if device == "cuda" else 0
    with bench_of(base / "model", base / "host", dtype="bfloat16", gpus=gpus) as bench:
        gaps, paused = [], []
        for number, directory in enumerate(versions):
            paused.append(bench.play(partial(_load, bench, directory, number)))
            gaps.append(_gap(bench, directory, number))
        refused = _refuses(bench, versions, base / "mixed")
        turns = bench.play(lambda: _turns(bench, len(versions) - 1))
    seconds, done = turns
    return {
        "ok": refused and max(gaps) < 5 * min(gaps) + 1e-3 and len(done) == TURNS,
        "paused_s": min(paused),
        "probe_gap": fmean(gaps),
        "refuses_the_version_before": refused,
        "turns_per_s": TURNS / seconds,
        "tokens_per_s": sum(len(one.token_ids) for one in done) / seconds,
    }


async def _load(bench: Bench, directory: Path, version: int) -> float:
    return await bench.server.load(str(directory), published(version), timeout_s=LOAD_S)


def _gap(bench: Bench, directory: Path, version: int) -> float:
    """Between what server and trainer say of the same tokens with the same weights."""
    probe = json.loads((directory / MANIFEST).read_text())["probe"]
    ids = probe["token_ids"]
    measured = bench.play(lambda: bench.server.probe(ids, published(version)))
    return probe_gap(tuple(probe["logprobs"]), measured)


def _refuses(bench: Bench, versions: list[Path], mixed: Path) -> bool:
    """Whether weights of one version under the checksums of the next are noticed."""
    shutil.copytree(versions[-2], mixed)
    shutil.copy(versions[-1] / MANIFEST, mixed / MANIFEST)
    try:
        bench.play(lambda: _load(bench, mixed, len(versions)))
    except ServerError:
        bench.play(lambda: _load(bench, versions[-1], len(versions) - 1))
        return True
    return False


async def _turns(bench: Bench, version: int) -> tuple[float, list[TurnGenerated]]:
    """Seconds of as many turns at once, and those that came back whole."""
    began = time.monotonic()
    prompts = [array("i", [4 + number, *range(5, 37)]) for number in range(TURNS)]
    turns = (
        Generate(
            request=number,
            trajectory=TrajectoryId(0, number),
            slot="local/0",
            incarnation=0,
            prompt_ids=prompt,
            max_tokens=TOKENS,
            cache_key=WeightVersion(1, version),
            priority=0,
        )
        for number, prompt in enumerate(prompts)
    )
    answers = await asyncio.gather(*(bench.server.generate(turn, SAMPLING) for turn in turns))
    done = [one for one in answers if isinstance(one, TurnGenerated)]
    return time.monotonic() - began, done
