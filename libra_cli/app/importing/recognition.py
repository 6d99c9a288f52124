"""Tells whose settings a file has, and which table of keys holds for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from libra_cli.app.importing.reading import Source
from libra_cli.config.errors import InputError
from libra_cli.config.other_names import prime_rl, trl, verl
from libra_cli.config.other_names.rule import Table

TRAINERS = ("trl", "verl", "prime-rl")
_TABLES = {"grpo": trl.GRPO, "async_grpo": trl.ASYNC_GRPO, "rloo": trl.RLOO, "sft": trl.SFT}
_PLAYED = ("num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon")
_IMITATED = ("packing", "max_length", "max_seq_length", "assistant_only_loss", "dataset_text_field")
_OTHERS = (
    "bco", "cpo", "distillation", "dpo", "gkd", "gold", "kto", "minillm", "mpo", "nash", "online",
    "orpo", "papo", "ppo", "prm", "reward", "sdft", "sdpo", "ssd", "tpo", "xpo",
)  # fmt: skip
_VERL_TRAINS = ("actor_rollout_ref.actor.", "algorithm.", "data.train_batch_size")
_PRIME_PLAYS = ("train.", "batch_size", "group_size", "algo.", "token_batch_size")
_PARTS: Mapping[str, tuple[str, ...]] = {
    "orchestrator": (
        "rollouts_per_example", "group_size", "env", "environment", "sampling", "algo", "train.",
        "max_async_level", "max_off_policy_steps", "eval.",
    ),
    "inference": ("vllm.", "parallel.", "server.", "model.max_model_len", "gpu_memory_utilization"),
    "trainer": ("optim.", "loss.", "scheduler.", "model.lora", "model.ac", "data.fake"),
}  # fmt: skip


def trainer_of(source: Source) -> str:
    """Return whose settings a file has: trl, verl or prime-rl.

    Raises:
        InputError: they are nobody's that libra import knows.
    """
    keys = list(source.values)
    if any(key.startswith("actor_rollout_ref.") for key in keys):
        return "verl"
    if source.is_toml:
        return "prime-rl"
    rules = [rule for table in _TABLES.values() for rule in table.rules if rule.why is None]
    known = {key for rule in rules for key in rule.theirs}
    if any(key in known for key in keys):
        return "trl"
    raise InputError(
        f"{source.path}: its keys ({', '.join(keys[:4])}) are not those of TRL's, verl's or "
        "prime-rl's reinforcement learning",
        hint=f"libra import --from {'|'.join(TRAINERS)} {source.path}",
    )


def table_of(trainer: str, sources: Sequence[Source]) -> tuple[Table, dict[str, Any]]:
    """Return the table that holds for some files of one trainer, and their settings together.

    Of a key that several files have, the last one counts.

    Raises:
        InputError: they are of an algorithm that libra has not.
    """
    if trainer == "verl":
        return _of_verl(sources)
    if trainer == "prime-rl":
        return _of_prime_rl(sources)
    values: dict[str, Any] = {}
    for source in sources:
        values |= source.values
    return _TABLES[_kind(sources, values)], values


def _kind(sources: Sequence[Source], values: Mapping[str, Any]) -> str:
    """The trainer of TRL's: by its class or script, by names of files and folders, or by keys."""
    played = any(key in values for key in _PLAYED)
    hints = [source.hint for source in sources if source.hint]
    places = [part for source in sources for part in source.path.with_suffix("").parts[-3:]]
    for words in (hints, places):
        named = _named(words)
        if named in _TABLES:
            return named
        if named and not (played and words is places):
            raise InputError(
                f"{sources[0].path}: is of TRL's {named}: libra trains by GRPO and RLOO, and by "
                "conversations (SFT)",
                hint="libra help losses",
            )
    if played or any(key in values for key in _IMITATED):
        return "grpo" if played else "sft"
    path, told = sources[0].path, _told_by_keys(sources[0])
    hints_of = {
        "trl": f"cp {path} grpo.yaml; libra import grpo.yaml",
        "": "libra help migration says which files libra import reads",
    }
    raise InputError(
        f"{path}: names nothing that tells GRPO ({', '.join(_PLAYED[:2])}) from SFT "
        f"({', '.join(_IMITATED[:2])})",
        hint=hints_of.get(told, f"libra import {path}"),
    )


def _told_by_keys(source: Source) -> str:
    """The trainer whose settings a file has; empty if they are nobody's."""
    try:
        return trainer_of(source)
    except InputError:
        return ""


def _named(words: Sequence[str]) -> str:
    """The trainer of TRL's that words name, the last word first; empty if they name none."""
    for word in reversed(words):
        parts = re.split(r"[^a-z0-9]+", word.lower())
        if "async" in parts and "grpo" in parts:
            return "async_grpo"
        for part in parts:
            if part in _TABLES or part in _OTHERS:
                return part
        if "gspo" in parts:
            return "grpo"
    return ""


def _of_verl(sources: Sequence[Source]) -> tuple[Table, dict[str, Any]]:
    values: dict[str, Any] = {}
    for source in sources:
        values |= source.values
    if not any(key.startswith(_VERL_TRAINS) for key in values):
        path, told = sources[0].path, _told_by_keys(sources[0])
        supervised = "libra help demonstrations, for supervised training"
        raise InputError(
            f"{path}: is none of verl's reinforcement learning (actor_rollout_ref)",
            hint=supervised if told in ("", "verl") else f"libra import {path}",
        )
    if any("one_step_off" in source.hint for source in sources):
        values["verl.experimental.one_step_off_policy"] = True
    return verl.VERL, values


# -- prime-rl --------------------------------------------------------------------------------------


def _of_prime_rl(sources: Sequence[Source]) -> tuple[Table, dict[str, Any]]:
    values: dict[str, Any] = {}
    for source in sources:
        values |= _renamed(_in_its_part(source.values))
    plays = tuple(f"orchestrator.{key}" for key in _PRIME_PLAYS)
    is_played = any(key.startswith(plays) for key in values)
    if not is_played and "data.name" not in values and "data.seq_len" not in values:
        raise InputError(
            f"{sources[0].path}: has neither an orchestrator, of rl, nor data, of sft",
            hint="give libra import all files of the run: libra import rl.toml; or "
            "libra import orch.toml train.toml infer.toml",
        )
    return (prime_rl.RL if is_played else prime_rl.SFT), values


def _in_its_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the part that a file of its own is for in front of its keys."""
    if any(key.startswith((*(f"{part}." for part in _PARTS), "data.name")) for key in values):
        return dict(values)
    for part, begins in _PARTS.items():
        if any(key.startswith(begins) for key in values) and "data.seq_len" not in values:
            return {f"{part}.{key}": value for key, value in values.items()}
    return dict(values)


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by today's names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        for _ in range(2):
            for old, new in prime_rl.RENAMED.items():
                if key == old or key.startswith(f"{old}."):
                    key = new + key.removeprefix(old)
        found[key] = value
    return found
