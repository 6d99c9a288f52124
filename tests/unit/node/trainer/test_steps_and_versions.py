"""A rank's steps and its versions: the next step begins before a version is complete."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from libra_cli.config.errors import ProcessError
from libra_cli.config.training import TrainingSpec
from libra_cli.node.control import Answer
from libra_cli.node.heartbeat import Heartbeat
from libra_cli.node.trainer import checkpoint
from libra_cli.node.trainer.commands import CheckpointCommand, CommandQueue, TrainCommand
from libra_cli.node.trainer.config import TrainerConfig
from libra_cli.node.trainer.main import TrainerRank, _work
from libra_cli.node.trainer.trainer import Trainer
from libra_cli.node.weights import publisher as module
from libra_cli.node.weights.tensor_rows import TensorRows, whole
from libra_cli.node.weights.versions import ProbeResult, VersionOnDisk, publish

PATIENCE_S = 20.0


class FakeTrainer:
    """Steps that only change its one weight. ``rank`` 0 writes, the others of its replica send."""

    published_dtype = torch.float32
    packed_log_ratios = b""

    def __init__(self, rank: int = 0, replica: int = 0, shards: int = 1) -> None:
        self.rank = rank
        self.replica = replica
        self.shards = shards
        self.local_ranks = ["0", "1"]
        self.step = 0
        self.weight = torch.zeros(4)
        self.begun: dict[int, threading.Event] = {1: threading.Event(), 2: threading.Event()}
        self.sent = 0

    def broadcast(self, command: Any) -> Any:
        return command

    def gather(self, value: Any) -> list[Any]:
        return self.local_ranks if value is not None else [value]

    def train(self, step: int, samples: Any, shares: Any) -> dict[str, Any]:
        self.begun[step].set()
        self.step = step
        self.weight += 1.0
        return {}

    def probe(self) -> ProbeResult:
        return ProbeResult([1, 2], [-1.0])

    def adapter_manifest(self) -> None:
        return None

    def written_weights(self, writers: int) -> Iterator[TensorRows]:
        self.sent += 1
        yield from whole([("w", self.weight)])

    def close(self) -> None:
        pass


def config(base: Path) -> TrainerConfig:
    return TrainerConfig(
        run_id="run",
        model_dir="",
        weights_dir=str(base),
        checkpoint_dir=str(base / "checkpoints"),
        socket="",
        world_size=1,
        trainer_incarnation=0,
        seed=1,
        dtype="float32",
        temperature=1.0,
        training=TrainingSpec.model_validate({}),
        max_len=16,
    )


@pytest.mark.parametrize("share", [None, 0.6])
def test_a_rank_is_held_to_its_share_of_its_own_gpu_before_it_takes_any_memory(
    tmp_path, monkeypatch, share
):
    done: list[object] = []

    def loads(config: TrainerConfig) -> Trainer:
        done.append("loads the model")
        raise InterruptedError

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *told: done.append(told)
    )
    monkeypatch.setattr("libra_cli.node.trainer.trainer.Trainer", loads)
    with pytest.raises(InterruptedError):
        _work(replace(config(tmp_path), memory_share=share), None, Heartbeat())
    assert done == [*([(share, 3)] if share else []), "loads the model"]


def train(queue: CommandQueue, step: int) -> None:
    with queue._changed:
        queue.accepted = step
        queue._add(TrainCommand(step, ()))


def told(queue: CommandQueue, what: str, step: int, within_s: float = PATIENCE_S) -> Answer | None:
    """The news of a step, waiting a while for it."""
    answer = queue.take(what, {"step": step})
    with queue._changed:
        queue._changed.wait_for(lambda: answer() is not None, within_s)
        return answer()


def test_the_next_step_begins_before_the_version_of_the_last_is_complete(tmp_path, monkeypatch):
    free = threading.Event()

    def slowly(*args: Any, version: int, **options: Any) -> VersionOnDisk:
        assert version == 0 or free.wait(PATIENCE_S)
        return publish(*args, version=version, **options)

    monkeypatch.setattr(module, "publish", slowly)
    fake, queue = FakeTrainer(), CommandQueue(max_len=16)
    rank = TrainerRank(config(tmp_path), queue, cast("Trainer", fake))
    rank.begin()
    assert queue.published["version"] == 0
    train(queue, 1)
    train(queue, 2)
    working = threading.Thread(target=rank.serve, daemon=True)
    working.start()
    assert told(queue, "done", 1)
    assert fake.begun[2].wait(PATIENCE_S), "the second step, while nothing of the first is written"
    assert told(queue, "published", 1, 0.0) is None
    queue.stop()
    free.set()
    working.join(PATIENCE_S)
    assert not working.is_alive()
    names = [(told(queue, "published", step, 0.0) or {})["name"] for step in (1, 2)]
    assert names == ["v000001-e0", "v000002-e0"], "the end has waited for both"


def test_a_version_that_cannot_be_written_fails_the_trainer(tmp_path, monkeypatch):
    def broken(*args: Any, version: int, **options: Any) -> VersionOnDisk:
        if version:
            raise OSError(28, "No space left on device")
        return publish(*args, version=version, **options)

    monkeypatch.setattr(module, "publish", broken)
    fake, queue = FakeTrainer(), CommandQueue(max_len=16)
    rank = TrainerRank(config(tmp_path), queue, cast("Trainer", fake))
    rank.begin()
    rank._obey(TrainCommand(1, ()))
    queue.accepted = 1
    with pytest.raises(ProcessError, match="the version was not written: OSError"):
        told(queue, "published", 1)


@pytest.mark.parametrize(("asked", "kept"), [(1, 2), (2, 2), (3, 3)])
def test_the_checkpoint_that_the_controller_knows_stays_beside_the_newest(
    tmp_path, monkeypatch, asked: int, kept: int
):
    keeps: list[int] = []

    def save(trainer: Any, root: Path, *, ledger: Any, keep: int) -> Path:
        keeps.append(keep)
        return root

    monkeypatch.setattr(checkpoint, "save", save)
    given = replace(config(tmp_path), training=TrainingSpec(keep_checkpoints=asked))
    rank = TrainerRank(given, None, cast("Trainer", FakeTrainer(rank=1)))
    rank._obey(CheckpointCommand({}))
    assert keeps == [kept]


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Remembers what was computed or copied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("replica", "sent"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_write_sends_its_part_for_the_first_replica_and_copies_nothing(
    tmp_path, replica: int, sent: int
):
    fake = FakeTrainer(rank=1, replica=replica)
    rank = TrainerRank(config(tmp_path), None, cast("Trainer", fake))
    with Operations() as operations:
        rank.begin()
    assert fake.sent == sent
    assert not operations.seen
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("number", "phase"), [(0, "waiting for a command"), (1, "waiting for rank 0")]
)
def test_only_rank_0_waits_for_commands(tmp_path, number: int, phase: str):
    class Seen(Exception):
        pass

    class Heart:
        def enter(self, entered: str) -> None:
            raise Seen(entered)

    queue = None if number else CommandQueue(max_len=16)
    fake, heart = cast("Trainer", FakeTrainer(rank=number)), cast("Heartbeat", Heart())
    rank = TrainerRank(config(tmp_path), queue, fake, heart)
    with pytest.raises(Seen, match=phase):
        rank.serve()


@pytest.mark.parametrize(
    ("local_ranks", "shards", "writers"),
    [
        (["0", "1", "2", "3"], 4, 4),
        (["0", "1", "0", "1"], 4, 2),  # those of the other host cannot write here
        (["0", "1", "2", "3"], 2, 2),  # those of another replica have nothing that these lack
        (["0", "1"], 1, 1),
        (["0", "0"], 2, 1),
        (["0"], 1, 1),
    ],
)
def test_the_ranks_of_the_first_host_that_hold_the_first_copy_write_versions(
    tmp_path, local_ranks: list[str], shards: int, writers: int
):
    for number in range(len(local_ranks)):
        fake = FakeTrainer(rank=number, replica=number // shards, shards=shards)
        fake.local_ranks = local_ranks
        queue = None if number else CommandQueue(len(local_ranks), 0, 16)
        rank = TrainerRank(config(tmp_path), queue, cast("Trainer", fake))
        assert (rank.publisher is not None) == (number == 0)
        assert (rank.part is not None) == (0 < number < writers)
        for writer in (rank.publisher, rank.part):
            if writer is not None:
                writer.close()
