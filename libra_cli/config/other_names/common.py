"""What rules of several tables make: hosts, a model's directory, lengths, a stand-in for tasks."""

from __future__ import annotations

import math
import re
from typing import Any

from libra_cli.config.other_names.rule import Given, LeftOut, Made, Refused, Setting, Why, shown

STEPS_UNKNOWN = 100
"""Steps of a recipe whose length the other configuration gives in epochs of data it names."""
PROMPT_TOKENS = 512
"""Tokens left for a prompt where a configuration bounds only what is generated."""
LORA_TARGETS = (
    "all-linear",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
MONITORS = ("mlflow", "tensorboard", "trackio", "wandb")


def model_path(name: Any) -> Made:
    """Yield the directory of a model that is named as on the Hub, or as a directory."""
    text = str(name)
    if text.startswith(("/", "~", ".")):
        yield Setting("model.path", text, "a directory, the same on every host")
    else:
        place = f"/models/{text.rpartition('/')[2]}"
        told = f"on every host: hf download {text} --local-dir {place}"
        yield Setting("model.path", place, told)


def hosts(count: int, gpus: int, told: str, *, serve: bool = True) -> Made:
    """Yield nodes: this machine, or names to be replaced by those that ssh knows.

    A server and the trainer share a GPU that is alone, unless nothing is served.
    """
    if count > 1:
        last = f"{count:02d}"
        node: dict[str, Any] = {"host": f"gpu-[01-{last}]", "gpus": gpus}
        yield Setting("nodes", [node], f"{told}; write your hosts as ssh knows them")
        return
    node = {"host": "local", "gpus": gpus}
    if gpus == 1 and serve:
        node["share"] = {"rollout": 0.3, "train": 0.6}
    yield Setting("nodes", [node], f"{told}; local is this machine")


def stand_in(told: str, *instead: str) -> Made:
    """Yield an environment that loads; ``instead`` are the lines of one's own to fill in."""
    yield Setting("environment.name", "calculator", told, instead)


def tasks_line(named: Any) -> str:
    """The line of YAML that names files of tasks."""
    files = named if isinstance(named, list) else [named]
    listed = ", ".join(map(str, files))
    return f"tasks: [{listed}]" if len(files) > 1 else f"tasks: {listed}"


def lengths(prompt: float, generated: float, told: str) -> Made:
    """Yield the most tokens of a trajectory, of a prompt and what is generated.

    Raises:
        Refused: nothing is left for a prompt.
    """
    most = math.ceil(prompt + generated)
    if prompt < 1:
        raise Refused(f"leaves no token for a prompt beside {generated:g} generated ones")
    yield Setting("model.max_len", most, told)


def packed_rows(key: str, longest: str) -> LeftOut:
    """Say that rows are blocks of several conversations each, whose number is not known.

    ``key`` is theirs that says so or counts them, and ``longest`` that of the tokens of a block.
    """
    return LeftOut(
        key,
        Why.BRING,
        f"rows are packed blocks of {longest} tokens, and libra counts conversations: set "
        f"training.groups_per_step to rows x {longest} / mean tokens of a conversation",
    )


def warmup(given: Given, steps_key: str, ratio_key: str, steps: int | None, updates: int) -> Made:
    """Yield the steps over which the learning rate rises; ``steps`` are those of the run.

    ``updates`` are the optimizer updates of a step of libra's, where theirs count updates.
    """
    told = given.get(steps_key, 0)
    if told >= 1:
        count = math.ceil(told / updates)
        yield Setting("training.warmup_steps", count, given.told(steps_key))
        return
    ratio_key = steps_key if told > 0 else ratio_key  # transformers 5 takes a share there too
    ratio = told if told > 0 else given.get(ratio_key, 0)
    if not ratio or ratio <= 0:
        return
    if steps is None:
        yield LeftOut(
            ratio_key,
            Why.BRING,
            f"is {ratio:g} of a run whose steps are not known: set training.warmup_steps",
        )
    else:
        yield Setting("training.warmup_steps", math.ceil(ratio * steps), given.told(ratio_key))


def adapter(given: Given, rank: str, alpha: str, targets: str) -> Made:
    """Yield an adapter by the keys of its rank, its weight and the matrices that it is of."""
    lora: dict[str, Any] = {"rank": given.number(rank), "alpha": round(given.number(alpha))}
    named = given.get(targets)
    words = re.findall(r"[\w-]+", named) if isinstance(named, str) else list(named or ())
    if set(words) - {*LORA_TARGETS}:
        other = sorted(set(words) - {*LORA_TARGETS})
        reason = f"names {', '.join(other)}: libra's are {', '.join(LORA_TARGETS)}"
        yield LeftOut(targets, Why.MISSING, reason)
        words = [word for word in words if word in LORA_TARGETS]
    if words and "all-linear" not in words:
        lora["target_modules"] = words
    told = "" if rank in given and alpha in given else given.told(rank, alpha)
    yield Setting("training.lora", lora, told)


def monitors(key: str, named: Any) -> Made:
    """Yield the dashboards among those that are named, and leave out those that libra has not."""
    names = [named] if isinstance(named, str) else list(named or ())
    known = [name for name in names if name in MONITORS]
    if known:
        yield Setting("run.monitors", known, f"pip install 'libra-rl[{','.join(known)}]'")
    for name in names:
        if name not in (*MONITORS, "none", "console", "all"):
            yield LeftOut(key, Why.MISSING, f"names {shown(name)}: libra help monitors")


def run_name(value: Any) -> str | None:
    """Return a name in the letters that a run's may have, or None where nothing is left of it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")[:64] or None


def every(value: Any) -> Any:
    """Return steps from one thing to the next; none where theirs say never."""
    return value if isinstance(value, int) and value > 0 else None
