"""A save that fails leaves nothing, one that is damaged is not loaded, and nothing is unpickled."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.checkpoints import random_states, reader  # noqa: E402
from libra_cli.node.checkpoints.contents import about_of  # noqa: E402
from libra_cli.node.checkpoints.reader import (  # noqa: E402
    CheckpointFiles,
    CheckpointReader,
    MetadataUnpickler,
)
from libra_cli.node.trainer import checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LEDGER = {"step": 1, "score": 0.5}


class OneRank:
    """What a checkpoint needs of a trainer that is alone in its world."""

    rank, world, sharded, control, critic = 0, 1, False, None, None

    def __init__(self, seed: int = 0, step: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)
        self.step = step
        self.config = SimpleNamespace(
            trainer_incarnation=1, training=SimpleNamespace(lora=None), model_dir=""
        )
        self.go()

    def go(self) -> None:
        self.model(torch.rand(2, 3)).sum().backward()
        self.optimizer.step()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def weights(self) -> list[float]:
        return [number for one in self.model.parameters() for number in one.flatten().tolist()]


def save(root: Path, trainer: OneRank, ledger: Mapping[str, Any] = LEDGER, keep: int = 2) -> Path:
    return checkpoint.save(trainer, root, ledger=ledger, keep=keep)  # type: ignore[arg-type]


def load(path: Path) -> OneRank:
    trainer = OneRank(seed=7)
    checkpoint.load(trainer, path)  # type: ignore[arg-type]
    return trainer


def test_what_is_saved_is_loaded_with_its_random_states(tmp_path: Path) -> None:
    trainer = OneRank()
    path = save(tmp_path, trainer)
    drawn = random.random(), np.random.rand(), float(torch.rand(1))
    again = load(path)
    assert again.weights() == trainer.weights()
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == drawn
    assert {one.suffix for one in path.iterdir()} == {".distcp", ".json", ""}


def test_every_file_is_listed_with_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBRA_NODE", "gpu-01")
    path = save(tmp_path, OneRank())
    about = about_of((path / "checkpoint.json").read_bytes(), path)
    assert set(about["files"]) == set(os.listdir(path)) - {"checkpoint.json"}
    assert {entry["host"] for entry in about["files"].values()} == {"gpu-01"}


def test_every_file_is_on_the_disk_before_its_directory_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[str](), os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = save(tmp_path, OneRank())
    draft = str(tmp_path / f".{path.name}")
    assert {f"{draft}/{name}" for name in os.listdir(path)} <= set(synced)
    assert synced[-2:] == [draft, str(tmp_path)], "then both directories"


@pytest.mark.parametrize("name", ["__0_0.distcp", "rng.json", ".metadata", "checkpoint.json"])
def test_a_damaged_file_is_not_loaded(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, OneRank())
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (path / name).write_bytes(data)
    with pytest.raises(TrainerError, match="is damaged"):
        load(path)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_to_torch(*_: object, **__: object) -> None:
    reason = RuntimeError("PytorchStreamWriter failed writing file data/0: No space left on device")
    raise CheckpointException("save", {0: (reason, reason.__traceback__)})


def test_a_disk_that_torch_finds_full_is_told_to_be_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra_cli.node.trainer.checkpoint.dcp.save", full_to_torch)
    with pytest.raises(checkpoint.SaveFailed, match=r"No space left on device; free some space"):
        save(tmp_path, OneRank())


@pytest.mark.parametrize("where", ["dcp.save", "write_durably", "replace_directory"])
def test_a_save_that_finds_the_disk_full_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    trainer = OneRank()
    before = save(tmp_path, trainer, keep=1)
    trainer.step = 2
    monkeypatch.setattr(f"libra_cli.node.trainer.checkpoint.{where}", full)
    with pytest.raises(checkpoint.SaveFailed, match=r"No space left.*; free some space there"):
        save(tmp_path, trainer, keep=1)
    assert list(tmp_path.iterdir()) == [before]
    monkeypatch.undo()
    assert load(before).step == 1
    assert save(tmp_path, trainer, keep=1).is_dir()


def test_a_checkpoint_that_another_host_could_not_write_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = OneRank()
    before = save(tmp_path, trainer, keep=1)
    trainer.step = 2

    def with_another(told: Any) -> list[Any]:
        failed = told == "" and (tmp_path / "step-000002-e1").exists()
        return [told, "b: PermissionError"] if failed else [told]

    monkeypatch.setattr(trainer, "gather", with_another)
    with pytest.raises(checkpoint.SaveFailed, match=r"^b: PermissionError$"):
        save(tmp_path, trainer, keep=1)
    assert list(tmp_path.iterdir()) == [before]


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda root: SimpleNamespace(free=100))
    monkeypatch.setattr("libra_cli.node.trainer.checkpoint.dcp.save", None)
    with pytest.raises(checkpoint.SaveFailed, match=r"free, and the checkpoint takes"):
        save(tmp_path, OneRank())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_older_checkpoint_does_not_keep_a_new_one_from_being_saved(
    tmp_path: Path,
) -> None:
    trainer = OneRank()
    before = save(tmp_path, trainer)
    (before / "checkpoint.json").write_bytes(b"\xff{")
    trainer.step = 2
    assert load(save(tmp_path, trainer)).step == 2


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


def test_a_description_that_names_anything_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for made in (Evil(), random.Random(), CheckpointFiles):
        with pytest.raises(TrainerError, match=r"names .* it is not torch's"):
            MetadataUnpickler(io.BytesIO(pickle.dumps(made))).load()
    assert not Path("evil").exists()


def test_a_value_that_is_no_plain_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packed = io.BytesIO()
    torch.save(Evil(), packed)
    packed.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        reader.PlainValues().load_bytes(SimpleNamespace(), packed)
    assert not Path("evil").exists()


def test_a_name_in_a_description_leads_to_no_other_directory(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path / "part")
    with (
        pytest.raises(TrainerError, match="is no file of"),
        files.create_stream(tmp_path / "part/../secret", "rb"),
    ):
        pass
    assert CheckpointReader(tmp_path / "part", files).fs is files


def older(path: Path, states: list[dict[str, Any]]) -> None:
    """As libra 0.1.0 wrote it."""
    torch.save(states, path / "rng.pt")
    about = json.loads((path / "checkpoint.json").read_bytes())
    kept = {key: about[key] for key in ("step", "world_size", "score")}
    (path / "checkpoint.json").write_text(json.dumps(kept))
    (path / "rng.json").unlink()


def test_a_checkpoint_of_an_older_libra_opens(tmp_path: Path) -> None:
    trainer = OneRank()
    path = save(tmp_path, trainer)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": None,
    }
    older(path, [state])
    drawn = random.random(), np.random.rand(), float(torch.rand(1))
    assert load(path).weights() == trainer.weights()
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == drawn


def test_an_older_one_s_random_states_hold_nothing_but_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packed = io.BytesIO()
    torch.save([{"python": Evil()}], packed)
    with pytest.raises(pickle.UnpicklingError):
        random_states.older_states(packed.getvalue())
    assert not Path("evil").exists()
