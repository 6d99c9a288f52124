"""Writes and loads checkpoints as directories, which appear by an atomic rename when complete.

    step-000010/
      .metadata, *.distcp    model and optimizer (torch.distributed.checkpoint; fp32, by name)
      rng.pt                 random states, one for each rank
      ledger.json            the controller's position in the data, as it was given
      checkpoint.json        step and world size; written last

The format is the same for replicas and shards, so a checkpoint can be resumed by a world of another
size or sharding. Replicas are written and read by rank 0 alone, so no shared directory is needed;
shards are written by all ranks, which must see the same directory. The learning rate is a function
of the step, so the step is the whole state of the schedule.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from libra_cli.config.errors import TrainerError
from libra_cli.node.trainer.trainer import Trainer
from libra_cli.node.weights.versions import (
    remove_old,
    remove_unfinished,
    replace_directory,
    write_durably,
)


def save(trainer: Trainer, root: Path, *, ledger: Mapping[str, Any], keep: int) -> Path:
    """*Collective.* Write the checkpoint of ``trainer.step`` and remove all but the last ``keep``.

    Returns:
        Its path, which exists on rank 0's host.

    Raises:
        TrainerError: a sharded checkpoint needs a directory that all hosts share.
    """
    final = root / f"step-{trainer.step:06d}"
    temporary = root / f".{final.name}"
    main = trainer.rank == 0
    if main:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_unfinished(root)
        temporary.mkdir(mode=0o700)
    trainer.gather(None)  # until it is made
    seen = trainer.gather(temporary.is_dir())
    if trainer.sharded and not all(seen):
        raise TrainerError(
            f"{root} is not the same directory on every train host, as a sharded checkpoint needs: "
            "put nodes[].workdir on shared storage, or train with sharding: ddp"
        )
    state = _state(trainer)
    if trainer.sharded:
        dcp.save(state, checkpoint_id=temporary, process_group=trainer.control)
    elif main:
        dcp.save(state, checkpoint_id=temporary, no_dist=True)
    states = trainer.gather(_random_state())
    if main:
        torch.save(states, temporary / "rng.pt")
        write_durably(temporary / "ledger.json", json.dumps(ledger).encode())
        about = {"step": trainer.step, "world_size": trainer.world}
        write_durably(temporary / "checkpoint.json", json.dumps(about).encode())
        replace_directory(temporary, final)
        remove_old(root, "step-*", keep=keep)
    return final


def load(trainer: Trainer, path: Path) -> None:
    """*Collective.* Restore the state that the trainer had when ``path`` was saved.

    Raises:
        TrainerError: there is no complete checkpoint.
    """
    about: dict[str, Any] | None = None
    states: list[dict[str, Any]] | None = None
    if trainer.rank == 0:
        about = _read_about(path)
        states = torch.load(path / "rng.pt", weights_only=False)
    about, states = trainer.broadcast(about), trainer.broadcast(states)
    state = _state(trainer)
    if trainer.sharded:
        dcp.load(state, checkpoint_id=path, process_group=trainer.control)
    else:
        if trainer.rank == 0:
            dcp.load(state, checkpoint_id=path, no_dist=True)
        state = trainer.broadcast(state)
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    trainer.step = int(about["step"])
    if trainer.rank < len(states):
        _restore_random_state(states[trainer.rank])


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return references to its tensors by name; loading into them fills them in place."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer}


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((path / "checkpoint.json").read_bytes())
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path} is not a complete checkpoint: {error}") from error
    return about


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _restore_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
