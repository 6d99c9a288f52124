"""Writes and loads checkpoints as directories, which appear by an atomic rename when complete.

    step-000010-e1/           after step 10, by the trainer's incarnation 1
      .metadata, *.distcp     model and optimizer (torch.distributed.checkpoint; fp32, by name);
                            with training.lora the adapter's parameters and no others
      rng.json                random states, one for each rank
      ledger.json             what the controller gave with it: its position in the data, the score
      critic.safetensors      with training.advantage: gae the critic and its optimizer
      checkpoint.json         step, world size and score, every file's size and checksum, of an
                              adapter the recipe's training.lora and the base model's fingerprint;
                              written last

No shared directory is needed. Where each rank has a replica, rank 0 alone writes and reads. Of
shards every host writes those of its own ranks into its own directory, with a copy of the small
files, and what several hosts hold alike only one of them, dealt evenly; what a rank needs of the
others when it starts again it asks their hosts for (``node.checkpoints``). The
format is the same for replicas and shards, so a checkpoint can be resumed by a world of another
size or sharding. The learning rate is a function of the step, so the step is the whole state of the
schedule.

The last few checkpoints stay, and the best of them by the controller's score. One that cannot be
written leaves nothing behind, and the trainer as it was.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from libra_cli.config.errors import LibraError, TrainerError
from libra_cli.config.training import LoraSpec
from libra_cli.node.checkpoints.contents import (
    COMPLETE,
    about_bytes,
    about_of,
    damaged,
    listed,
)
from libra_cli.node.checkpoints.random_states import (
    older_states,
    random_state,
    restore_random_state,
)
from libra_cli.node.checkpoints.reader import CheckpointFiles, CheckpointReader, PlainValues
from libra_cli.node.credentials import Credentials
from libra_cli.node.model.adapter import published_name
from libra_cli.node.model.build import fingerprint
from libra_cli.node.trainer.trainer import Trainer
from libra_cli.node.weights.adapter import is_adapter
from libra_cli.node.weights.files import write_durably
from libra_cli.node.weights.versions import remove_unfinished, replace_directory

RANDOM = "rng.json"
CRITIC = "critic.safetensors"
METADATA = ".metadata"
"""Where torch says which file holds which part of which tensor; rank 0 writes it."""
_BY_RECIPE = ("betas", "eps", "foreach")
"""What a recipe and the ranks of today say of the optimizer, whatever was when it was saved."""
log = logging.getLogger("libra.trainer")


class SaveFailed(TrainerError):
    """A checkpoint could not be written. Every rank knows, nothing of it is left, and all go on."""


def save(trainer: Trainer, root: Path, *, ledger: Mapping[str, Any], keep: int) -> Path:
    """*Collective.* Write the checkpoint of ``trainer.step`` below ``root``, of every host its own.

    Removes all but the last ``keep`` and the best by the ledger's ``score``, or by those of its
    ``evaluated``, pairs of a step and a score; those of the steps ``evaluating`` may become that.

    Returns:
        Its path on rank 0's host.

    Raises:
        SaveFailed: on every rank alike, if it cannot be written on one.
    """
    final = root / f"step-{trainer.step:06d}-e{trainer.config.trainer_incarnation}"
    draft = root / f".{final.name}"
    writes = _writes_for_host(trainer)
    left = [draft]
    try:
        _write(trainer, draft, ledger, writes=writes)
        with _agreed(trainer):
            if writes:
                replace_directory(draft, final)
                left.append(final)  # another host may fail here
    except SaveFailed:
        if writes:
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
        raise
    # Nothing is removed for it before every host has its part.
    found = trainer.gather(_scores(root) if writes else {})
    if writes:
        together = {name: score for scores in found for name, score in scores.items()}
        if "evaluated" in ledger:
            evaluated = dict(map(tuple, ledger["evaluated"]))
            together = {name: evaluated.get(_written_at(name)[0]) for name in together}
        pending = ledger.get("evaluating", ())
        _remove_others(root, kept_checkpoints(together, keep, newest=final.name, pending=pending))
    return final


def _write(trainer: Trainer, draft: Path, ledger: Mapping[str, Any], *, writes: bool) -> None:
    """*Collective.* Write all files of a checkpoint to ``draft``, which is no checkpoint's name."""
    state = _state(trainer)
    hosts = sum(trainer.gather(writes))
    with _agreed(trainer):
        if writes:
            draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_unfinished(draft.parent)
            _check_room(draft.parent, _bytes_of(state) // hosts)
            draft.mkdir(mode=0o700)
    with _agreed(trainer), _reasons():
        if trainer.sharded:
            dcp.save(state, checkpoint_id=draft, process_group=trainer.control)
        elif writes:
            dcp.save(state, checkpoint_id=draft, no_dist=True)
    small = _small_files(trainer, draft, ledger)
    parts: dict[str, dict[str, Any]] = {}
    with _agreed(trainer):
        if writes:
            for name, data in small.items():
                write_durably(draft / name, data)
            parts = listed(draft, os.listdir(draft), os.environ.get("LIBRA_NODE", ""))
    files = {name: entry for found in trainer.gather(parts) for name, entry in found.items()}
    about = trainer.broadcast({**_about(trainer, ledger), "files": files})
    with _agreed(trainer):
        if writes:
            write_durably(draft / COMPLETE, about_bytes(about))


@contextmanager
def _agreed(trainer: Trainer) -> Iterator[None]:
    """*Collective.* Raise SaveFailed on all ranks if the block has failed on any of them."""
    problem = ""
    try:
        yield
    except (OSError, RuntimeError, LibraError) as error:
        name = os.environ.get("LIBRA_NODE", "")
        said = str(error) if isinstance(error, LibraError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, LibraError):
            said += _advice(error)
        problem = f"{name}: {said}" if name else said
    problems = [found for found in trainer.gather(problem) if found]
    if problems:
        raise SaveFailed(problems[0])


def _bytes_of(state: Any) -> int:
    """Bytes of all tensors in a state, unsharded."""
    if isinstance(state, Mapping):
        return sum(_bytes_of(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_bytes_of(value) for value in state)
    return state.numel() * state.element_size() if hasattr(state, "element_size") else 0


def _check_room(root: Path, needed: int) -> None:
    """Raises TrainerError if there is less, before anything is written."""
    free = shutil.disk_usage(root).free
    if free < needed:
        raise TrainerError(
            f"{root} has {free / 1e9:.2f} GB free, and the checkpoint takes {needed / 1e9:.2f} GB: "
            "free some space there"
        )


def kept_checkpoints(
    scores: Mapping[str, float | None], keep: int, newest: str, pending: Collection[int] = ()
) -> set[str]:
    """Return the names of the last ``keep`` checkpoints and of the best, of which each has a score.

    Those of the steps ``pending`` stay too: their scores are not known yet.
    One that is ahead of the ``newest``, or of the same step, was written by a trainer that died
    before anybody heard of it; it goes. Of equals the older is better: it took fewer steps.
    """
    step, _ = _written_at(newest)
    older = [name for name in scores if _written_at(name)[0] < step]
    names = [*sorted(older, key=_written_at), newest]
    known = {name: score for name in names if (score := scores.get(name)) is not None}
    best = [max(known, key=known.__getitem__)] if known else []
    unknown = [name for name in names if _written_at(name)[0] in pending]
    return {*names[-keep:], *best, *unknown}


def _written_at(name: str) -> tuple[int, int]:
    """Step and trainer incarnation of a checkpoint; libra 0.1.0 gave it no incarnation."""
    _, step, *incarnation = name.split("-")
    return int(step), int(incarnation[0][1:]) if incarnation else -1


def load(trainer: Trainer, path: Path, urls: Sequence[str] = ()) -> None:
    """*Collective.* Restore the state that the trainer had when ``path`` was saved.

    ``path`` is this host's own part, if it has one; other hosts give at ``urls`` what is missing.

    Raises:
        TrainerError: there is no complete checkpoint.
    """
    files = CheckpointFiles(path, urls, Credentials.here() if urls else None)
    with _agreed_to_read(trainer):
        _check_files(trainer, path)
    about: dict[str, Any] | None = None
    states: list[dict[str, Any]] | None = None
    with _agreed_to_read(trainer):
        if trainer.rank == 0:
            about = about_of(files.read(COMPLETE), path / COMPLETE)
            states = _random_states(files, about)
    about, states = trainer.broadcast(about), trainer.broadcast(states)
    _check_adapter(trainer, about.get("adapter"), path)
    state = _state(trainer)
    reader = CheckpointReader(path, files)
    with _reasons():
        if trainer.sharded:
            dcp.load(
                state,
                storage_reader=reader,
                planner=PlainValues(),
                process_group=trainer.control,
            )
        elif trainer.rank == 0:
            dcp.load(state, storage_reader=reader, planner=PlainValues(), no_dist=True)
    if not trainer.sharded:
        state = trainer.broadcast(state)
    groups = trainer.optimizer.param_groups
    made = [{name: group[name] for name in _BY_RECIPE if name in group} for group in groups]
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=trainer.config.training.lora is None),
    )
    for group, of_recipe in zip(trainer.optimizer.param_groups, made, strict=True):
        group.update(of_recipe)  # torch took over those of the checkpoint
    _load_critic(trainer, files, about)
    trainer.step = int(about["step"])
    if trainer.rank < len(states):
        restore_random_state(states[trainer.rank])


def _load_critic(trainer: Trainer, files: CheckpointFiles, about: Mapping[str, Any]) -> None:
    """*Collective.* A checkpoint of before there was a critic leaves it as a run begins."""
    if trainer.critic is None:
        return
    data: bytes | None = None
    if CRITIC not in about.get("files", {}):
        log.warning(
            "the checkpoint of step %d has no critic, since training.advantage was another: it "
            "begins with the value 0 for every turn",
            about["step"],
        )
        return
    with _agreed_to_read(trainer):
        if trainer.rank == 0:
            data = files.read(CRITIC)
    data = trainer.broadcast(data)
    with _agreed_to_read(trainer):
        trainer.critic.head.restore(data)


@contextmanager
def _agreed_to_read(trainer: Trainer) -> Iterator[None]:
    """*Collective.* The same of a checkpoint that is read."""
    try:
        with _agreed(trainer):
            yield
    except SaveFailed as error:
        raise TrainerError(str(error), hint="libra run RECIPE --resume RUN_DIR") from error


def _check_files(trainer: Trainer, path: Path) -> None:
    """Raises TrainerError if a file of this host's part is not as it was written."""
    if not (_writes_for_host(trainer) and (path / COMPLETE).is_file()):
        return
    problems = damaged(path, about_of((path / COMPLETE).read_bytes(), path / COMPLETE))
    if problems:
        raise TrainerError(f"{path} is damaged: {'; '.join(problems)}")


def _random_states(files: CheckpointFiles, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "files" not in about:
        return older_states(files.read("rng.pt"))
    found: list[dict[str, Any]] = json.loads(files.read(RANDOM))
    return found


@contextmanager
def _reasons() -> Iterator[None]:
    """Let what went wrong on a rank be told as it was; torch wraps it in a ``BaseException``."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise TrainerError(f"rank {rank}: {reason}{_advice(reason)}") from error


def _advice(error: BaseException) -> str:
    """Return what to do about an error of writing, as the end of a sentence; empty if nothing is
    known. torch tells a full disk in words only."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "; free some space there" if is_full or "No space left" in str(error) else ""


def _writes_for_host(trainer: Trainer) -> bool:
    """Whether this rank makes its host's directory: the first one there, or of replicas rank 0."""
    if trainer.sharded:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    main: bool = trainer.rank == 0
    return main


def _small_files(trainer: Trainer, draft: Path, ledger: Mapping[str, Any]) -> dict[str, bytes]:
    """*Collective.* What every host gets a copy of, by name."""
    states = trainer.gather(random_state())
    metadata = (draft / METADATA).read_bytes() if trainer.rank == 0 else None
    critic = {} if trainer.critic is None else {CRITIC: trainer.critic.head.saved()}
    return {
        **critic,
        METADATA: trainer.broadcast(metadata),
        RANDOM: json.dumps(states).encode(),
        "ledger.json": json.dumps(ledger).encode(),
    }


def _about(trainer: Trainer, ledger: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``checkpoint.json`` says besides its files: step, ranks, score and adapter."""
    about = {"step": trainer.step, "world_size": trainer.world, "score": ledger.get("score")}
    if trainer.rank == 0 and (adapter := _adapter(trainer)):
        about["adapter"] = adapter
    return about


def _scores(root: Path) -> dict[str, float | None]:
    """The complete checkpoints of this host by name, each with its score if it has one."""
    found: dict[str, float | None] = {}
    for path in root.glob(f"step-*/{COMPLETE}"):
        try:
            found[path.parent.name] = about_of(path.read_bytes(), path).get("score")
        except (OSError, TrainerError):
            continue  # a damaged one is none, and goes
    return found


def _remove_others(root: Path, kept: Collection[str]) -> None:
    for path in root.glob("step-*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return references to its tensors by name; loading into them fills them in place."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    if trainer.config.training.lora is not None:
        model = {name: one for name, one in model.items() if is_adapter(published_name(name))}
    return {"model": model, "optimizer": optimizer}


def _adapter(trainer: Trainer) -> dict[str, Any] | None:
    """Return the recipe's ``lora`` and the base model's fingerprint; None without an adapter."""
    lora = trainer.config.training.lora
    if lora is None:
        return None
    return {
        "lora": lora.model_dump(mode="json"),
        "base": fingerprint(Path(trainer.config.model_dir)),
    }


def _check_adapter(trainer: Trainer, saved: Mapping[str, Any] | None, path: Path) -> None:
    """Raises TrainerError, on all ranks alike, if the checkpoint is of other parameters."""
    mine = trainer.broadcast(_adapter(trainer) if trainer.rank == 0 else None)
    if saved:  # an older libra knew fewer keys
        lora = LoraSpec.model_validate(saved["lora"]).model_dump(mode="json")
        saved = {**saved, "lora": lora}
    if mine == saved:
        return
    if mine and saved and mine["lora"] == saved["lora"]:
        reason = f"is of an adapter for another model than {trainer.config.model_dir}"
    else:
        told = [json.dumps(one["lora"]) if one else "null" for one in (saved, mine)]
        reason = f"was written with training.lora {told[0]}, and the recipe has {told[1]}"
    raise TrainerError(
        f"{path} {reason}",
        hint="resume with the recipe and the model that the run began with",
    )
