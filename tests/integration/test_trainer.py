"""The trainer as it is run: real ``accelerate launch``, real gloo worlds."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from libra_cli.core.launch.process import ProcessSpec  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.runtime.hosts.local import LocalTransport  # noqa: E402
from libra_cli.runtime.trainer import rank_watch  # noqa: E402
from libra_cli.runtime.trainer.rank_watch import RankWatch  # noqa: E402
from tests.control import is_silent  # noqa: E402
from tests.trainers import (  # noqa: E402
    TOKEN,
    batch,
    largest_difference,
    processes_marked,
    trainer,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]
NEAR = 1e-4
"""The most that a parameter may differ by the order of sums alone, which Adam makes large where a
gradient is next to nothing: 1.3e-5 on an x86 with AVX2, less with AVX-512. A wrong gradient moves
one by the learning rate of a step, 1e-3."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0).save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory


class LocalHost:
    """This machine, with the files of a run in one directory."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.transport = LocalTransport()

    async def tail(self, process: str, lines: int = 20) -> str:
        return "the end"


@dataclass(frozen=True)
class Reference:
    """Four steps by one process, with a checkpoint after the second."""

    initial: dict[str, Any]
    last: dict[str, Any]
    results: list[dict[str, Any]]
    checkpoint: Path


@pytest.fixture(scope="module")
def reference(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    with trainer(tmp_path_factory.mktemp("one") / "run", model_dir) as one:
        one.wait_ready()
        first = one.step(1)
        path = one.checkpoint(2, {"position": [2, "groups"]})
        results = [first, one.step(3), one.step(4)]
        initial, last = one.parameters(0), one.parameters(4)
        assert one.stop() == 0
    return Reference(initial, last, results, path)


def test_a_step_is_measured_and_moves_the_policy(reference: Reference):
    metrics = reference.results[0]["metrics"]
    assert metrics["learning_rate"] == pytest.approx(1e-3 / 3)
    assert metrics["generated_tokens"] > metrics["logprob_gap_tokens"] > 0
    assert "kl" not in metrics
    assert 0 < metrics["grad_norm"] < 100
    assert 0 < metrics["entropy"] < np.log(268)
    assert metrics["trainer_s"] > metrics["publish_s"] > 0
    assert reference.results[0]["version"]["name"] == "v000001-e0"
    assert largest_difference(reference.initial, reference.last) > 1e-3


def test_resuming_gives_exactly_what_going_on_would_have(
    reference: Reference, model_dir: Path, tmp_path: Path
):
    assert json.loads((reference.checkpoint / "ledger.json").read_text()) == {
        "position": [2, "groups"]
    }
    directory = tmp_path / "again"
    with trainer(directory, model_dir, resume=reference.checkpoint, incarnation=1) as resumed:
        assert resumed.wait_ready()["published"]["name"] == "v000002-e1"
        again = [resumed.step(number)["metrics"] for number in (3, 4)]
        before = [result["metrics"] for result in reference.results[1:]]
        for name in ("loss", "grad_norm", "entropy", "learning_rate"):
            assert [step[name] for step in again] == [step[name] for step in before]
        assert largest_difference(resumed.parameters(4), reference.last) == 0
        assert resumed.stop() == 0


def test_two_replicas_give_the_same_parameters_and_end_when_one_dies(
    reference: Reference, model_dir: Path, tmp_path: Path
):
    with trainer(tmp_path / "two", model_dir, processes=2, sharding="ddp") as two:
        two.wait_ready()
        for number in range(1, 5):
            two.step(number)
        assert largest_difference(two.parameters(4), reference.last) < NEAR
        (victim,) = (
            pid
            for pid, environment in processes_marked(two.marker).items()
            if b"\0RANK=1\0" in environment
        )
        os.kill(victim, signal.SIGKILL)
        assert two.process.wait(60) != 0


def test_two_shards_resume_a_replica_s_checkpoint_and_the_other_way_round(
    reference: Reference, model_dir: Path, tmp_path: Path
):
    options: dict[str, Any] = {"resume": reference.checkpoint, "sharding": "fsdp2"}
    with trainer(tmp_path / "two", model_dir, processes=2, **options) as two:
        assert two.wait_ready()["published"]["version"] == 2
        path = two.checkpoint(3, {"position": 3})
        assert "sharded" in two.log.read_text()
        two.step(4)
        assert largest_difference(two.parameters(4), reference.last) < NEAR
        assert len([*two.versions.glob("v000004-e*/*.safetensors")]) == 2, "each rank writes"
        assert two.stop() == 0
    with trainer(tmp_path / "one", model_dir, resume=path) as one:
        assert one.wait_ready()["published"]["version"] == 3
        one.step(4)
        assert largest_difference(one.parameters(4), reference.last) < NEAR
        assert one.stop() == 0


@pytest.mark.nightly  # the same of one step's gradients: test_sharded_gradients
def test_activations_computed_again_give_the_same_parameters(
    reference: Reference, model_dir: Path, tmp_path: Path
):
    options: dict[str, Any] = {"sharding": "fsdp2", "activation_checkpointing": "selective"}
    with trainer(tmp_path / "two", model_dir, processes=2, **options) as two:
        two.wait_ready()
        for number in range(1, 5):
            two.step(number)
        assert largest_difference(two.parameters(4), reference.last) < NEAR
        assert two.stop() == 0


@pytest.mark.nightly  # the same of one step's gradients: test_sharded_gradients
def test_a_tied_model_in_shards_in_bfloat16_computes_again_what_one_process_keeps_in_float32(
    tmp_path: Path,
):
    model_dir = tmp_path / "tied"
    model = new_model(build_tokenizer(), seed=0)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(model_dir)
    save_tokenizer(build_tokenizer(), model_dir, max_len=POSITIONS)
    shared: dict[str, Any] = {"kl_coef": 0.1}
    narrow: dict[str, Any] = {
        "processes": 2,
        "precision": "bf16",
        "sharding": "fsdp2",
        "activation_checkpointing": "full",
    }
    steps = []
    for name, options in (("one", shared), ("two", shared | narrow)):
        with trainer(tmp_path / name, model_dir, **options) as world:
            world.wait_ready()
            steps.append([world.step(number)["metrics"] for number in (1, 2)])
            assert "lm_head.weight" not in world.parameters(2)
            assert world.stop() == 0
    for one, two in zip(*steps, strict=True):
        for metric in ("entropy", "grad_norm", "tis_mean"):
            assert two[metric] == pytest.approx(one[metric], rel=0.02)
        assert two["generated_tokens"] == one["generated_tokens"]


@pytest.mark.nightly  # the same of one step's gradients: test_sharded_gradients
def test_the_kl_to_the_reference_starts_at_zero_and_grows(model_dir: Path, tmp_path: Path):
    options: dict[str, Any] = {"kl_coef": 0.1, "sharding": "fsdp2"}
    with trainer(tmp_path / "kl", model_dir, processes=2, **options) as two:
        two.wait_ready()
        first, second = (two.step(number)["metrics"]["kl"] for number in (1, 2))
        assert abs(first) < 1e-6
        assert second > 1e-6
        assert two.stop() == 0


def test_a_world_of_the_wrong_size_fails_at_start_and_says_so(model_dir: Path, tmp_path: Path):
    with trainer(tmp_path / "wrong", model_dir, processes=1, world_size=2) as wrong:
        with pytest.raises(AssertionError, match="rank 0 is in a world of 1, but the plan has 2"):
            wrong.wait_ready()
        assert wrong.stop() != 0


def test_a_step_that_fails_is_reported_and_ends_the_trainer(model_dir: Path, tmp_path: Path):
    with trainer(tmp_path / "failing", model_dir) as failing:
        failing.wait_ready()
        silent = {**batch(1)[0], "loss_mask": bytes(len(batch(1)[0]["loss_mask"]))}
        failing.send(1, [silent])
        outcome, reason = failing.ask("done", {"step": 1})
        assert outcome == "failed"
        assert "step 1 has no generated token to learn from" in reason
        assert failing.stop() != 0


def test_a_rank_that_is_stopped_in_a_step_is_named_while_rank_0_goes_on_answering(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    speed = 6.0  # of the watch's clock: in its 50 s of silence every rank beats many times
    monkeypatch.setattr(rank_watch, "LOOK_EVERY_S", 15.0 / speed)
    host: Any = LocalHost(str(tmp_path / "two"))
    cluster: Any = SimpleNamespace(
        hosts={"here": host}, clock=lambda: speed * time.monotonic(), lost=set()
    )
    spec = ProcessSpec("here", "trainer-0", (), {}, {"config.json": ""})
    with trainer(tmp_path / "two", model_dir, processes=2) as two:
        two.wait_ready()
        pids = processes_marked(str(tmp_path / "two"))
        (frozen,) = [pid for pid, environment in pids.items() if b"\0RANK=1\0" in environment]
        os.kill(frozen, signal.SIGSTOP)
        two.send(1, batch(1))
        watch = RankWatch(cluster, [spec], 0)
        told = asyncio.run(asyncio.wait_for(watch.until_stalled(), 60.0))
        assert is_silent(two.socket, TOKEN, "done", {"step": 1})
    assert re.search(
        r"trainer-0 on here made no progress for \d+ s \(rank 1, .*it is stopped", told
    )
    assert told.endswith("next: libra logs here trainer-0")
