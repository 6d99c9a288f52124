"""What the card of an exported model says of the run it comes from, from the database alone.

The host that makes the model adds the base model's licence (``node.checkpoints.export``). Hosts,
accounts and secrets are left out, and of paths all but the last part: a card is made to be shared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from libra_cli import __version__
from libra_cli.config.recipe import Recipe
from libra_cli.config.secrets import is_secret_name
from libra_cli.config.training import LoraSpec
from libra_cli.core.records import StepRecord
from libra_cli.report.status.steps import yardstick
from libra_cli.runtime.store.reader import Reader

TAGS = ("libra", "reinforcement-learning", "grpo", "agent")
_PRIVATE = {"secrets", "headers", "url", "mcp", "workers"}
"""Keys that are left out wherever they stand."""
_DIRECTORY = re.compile(
    r"(?:^|(?<=[\s=:,'\"\[(])(?<!:/)|(?<=file://))(?!//)[~/](?:[\w.@+-]*/)+(?=\S)"
)
_HOST = re.compile(r"(?<=://)[^\s/]+")


def model_card(reader: Reader, recipe: Recipe, step: int) -> dict[str, Any]:
    """The card of the model after ``step``: its ``name``, ``base``, ``tags`` and ``body``."""
    base = base_of(recipe)
    name = f"{base}-{recipe.run.name}-step-{step}"
    steps = [row for row in reader.steps() if row.step <= step]
    rows = "\n".join(f"| {what} | {value} |" for what, value in _facts(reader, recipe, steps, step))
    body = CARD.format(
        name=name,
        base=base,
        how=_how(recipe),
        facts=rows,
        recipe=json.dumps(_shared(recipe), indent=2),
    )
    return {"name": name, "base": base, "tags": list(TAGS), "body": body.strip()}


def _environments(recipe: Recipe) -> str:
    return "demonstrations" if recipe.demonstrations else ", ".join(recipe.environment_labels)


def _how(recipe: Recipe) -> str:
    if recipe.demonstrations:
        return "trained to imitate demonstrations"
    taught = ", judged by a teacher," if recipe.teacher is not None else ""
    return f"trained by reinforcement learning on the environment `{_environments(recipe)}`{taught}"


def base_of(recipe: Recipe) -> str:
    """Return the name of the model's directory, or ``libra-small`` for one that libra builds."""
    if recipe.model.path is None:
        return "libra-small"
    return PurePosixPath(recipe.model.path).name


def _facts(
    reader: Reader, recipe: Recipe, steps: Sequence[StepRecord], step: int
) -> list[tuple[str, str]]:
    training, rollout = recipe.training, recipe.rollout
    judged, run = yardstick(steps), reader.run()
    change = judged.change
    versions = [row for row in reader.versions() if row.version == step]
    version = f"v{step:06d}-e{versions[-1].trainer_incarnation}" if versions else f"v{step:06d}"
    generated = sum(row.generated_tokens for row in steps)
    return [
        ("run", run.id),
        ("base model", base_of(recipe)),
        ("environment", _environments(recipe)),
        ("steps", f"{step} of {run.target_steps}"),
        ("weight version", version),
        (f"{judged.name}, mean of the first 10 steps", _number(change.first)),
        (f"{judged.name}, mean of the last 10 steps", _number(change.last)),
        ("trained on", f"{generated:,} generated tokens"),
        ("loss", training.loss),
        ("trained", _trained(training.lora)),
        ("learning rate", f"{training.learning_rate:g}"),
        ("batch", f"{training.groups_per_step} prompts of {rollout.group_size} trajectories"),
        ("temperature of rollouts", f"{rollout.temperature:g}"),
        ("longest trajectory", f"{recipe.model.max_len} tokens"),
        ("trained with", f"libra {__version__}"),
    ]


def _trained(lora: LoraSpec | None) -> str:
    if lora is None:
        return "all weights"
    return (
        f"an adapter of rank {lora.rank}, alpha {lora.alpha}, of {', '.join(lora.target_modules)}"
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _shared(recipe: Recipe) -> dict[str, Any]:
    """The recipe without what is private or of no use elsewhere."""
    told = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"nodes", "weight_sync"})
    for section, names in (
        ("agent", ("env", "directory", "nodes")),
        ("run", ("directory", "monitors")),
    ):
        for name in names:
            told.get(section, {}).pop(name, None)
    return {key: _public(value) for key, value in told.items()}


def _public(value: Any) -> Any:
    """A value without keys that are private, directories that files lie in, and hosts of URLs."""
    match value:
        case dict():
            return {name: _public(one) for name, one in value.items() if not _is_private(name, one)}
        case list():
            return [_public(one) for one in value]
        case str():
            return _HOST.sub("HOST", _DIRECTORY.sub("", value))
        case _:
            return value


def _is_private(name: str, value: Any) -> bool:
    return name in _PRIVATE or (isinstance(value, str) and is_secret_name(name))


CARD = """
# {name}

{base}, {how} with
[libra](https://pypi.org/project/libra-rl/). Rewards and losses are those of the training batches;
nothing here was measured on tasks held out.

| | |
| --- | --- |
{facts}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
```

or `vllm serve DIRECTORY`.

## Recipe

What differs from the defaults, without the hosts:

```json
{recipe}
```
"""
