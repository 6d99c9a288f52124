"""Finds out what there is, and writes the recipe that ``app.init.choices`` chooses for it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import yaml

from libra_cli.app.dry_run import plan_of
from libra_cli.app.explain import recipe_schema
from libra_cli.app.init.choices import (
    SHARES,
    FoundModel,
    SizeChoice,
    fits,
    in_words,
    left_out,
    model_of,
    nodes_for,
    sizes_for,
)
from libra_cli.config.errors import HostError, InputError, LibraError, RecipeError
from libra_cli.config.host_ranges import expand_range
from libra_cli.config.recipe import LOCAL, NodeSpec, Recipe
from libra_cli.envs.registry import installed_environments
from libra_cli.report.html.templates import template
from libra_cli.runtime.doctor.discovery import FoundHost, discover
from libra_cli.runtime.episodes.renderer import Renderer

_TEMPLATE = "recipe.yaml.j2"


@dataclass(frozen=True, slots=True)
class InitOrder:
    """What the user asks of ``libra init`` on the command line."""

    hosts: tuple[str, ...]
    """Hosts as ``ssh`` takes them, or ranges; none means this machine."""
    model: str | None
    recipe: Path
    """Path that the recipe is written to."""
    force: bool
    schema: bool
    """Whether to write the JSON Schema beside it."""


@dataclass(frozen=True, slots=True)
class InitResult:
    """What ``libra init`` found on the hosts and in the model, and what to type next."""

    found: tuple[str, ...]
    """A line for each host, for the model and for what is not used."""
    problems: tuple[tuple[str, str], ...]
    """Hosts that did not answer: why, and the next thing to type."""
    next: tuple[str, str]


def init(order: InitOrder) -> InitResult:
    """Write a recipe that passes ``libra run --dry-run``.

    Raises:
        InputError: there is such a file or no place for it, no host answers, or nothing that is
            there can train the model.
    """
    if order.recipe.exists() and not order.force:
        raise InputError(
            f"{order.recipe} is there already",
            hint=f"libra run --dry-run {order.recipe}; or libra init --force, which replaces it",
        )
    if not order.recipe.parent.is_dir():
        raise InputError(
            f"{order.recipe}: there is no directory {order.recipe.parent}",
            hint=f"mkdir -p {order.recipe.parent}",
        )
    order = replace(order, model=_absolute(order.model))
    nodes = list(_nodes(order.hosts))
    with tempfile.TemporaryDirectory() as place:
        found = asyncio.run(discover(nodes, order.model, Path(place)))
        _require_one(found)
        model = _model(order.model, found, Path(place)) if order.model is not None else None
    _write(order, _chosen(order, found, model))
    return _result(order, found, model)


def _absolute(model: str | None) -> str | None:
    if model is None or model.startswith(("/", "~")):
        return model
    here = Path(model).absolute()
    if here.is_dir():
        return str(here)
    raise InputError(
        f"{model} is no directory here, and no absolute path on the hosts",
        hint=f"hf download {model} --local-dir /models/{here.name}",
    )


def _nodes(hosts: Sequence[str]) -> Iterator[NodeSpec]:
    names = [one for text in hosts for one in _range(text)] or [LOCAL]
    if LOCAL in names and len({*names}) > 1:
        raise RecipeError(
            "local is this machine, which the other hosts would have to reach by a name",
            hint="libra init with this machine's name in its place, as the others know it",
        )
    for name in dict.fromkeys(names):
        user, _, host = name.rpartition("@")
        try:
            yield NodeSpec(host=host, user=user or None)
        except ValueError as error:
            several = name.replace(",", " ").split()
            raise RecipeError(
                f"{name!r} is no host: an alias of ~/.ssh/config, a name, or user@name",
                hint=f"libra init {' '.join(several) if several[1:] else 'HOST'}",
            ) from error


def _range(text: str) -> list[str]:
    try:
        return expand_range(text)
    except ValueError as error:
        raise RecipeError(f"{text} {error}", hint="libra init 'gpu-[01-06]' is of six") from error


def _require_one(found: Sequence[FoundHost]) -> None:
    if all(one.error for one in found):
        lines = [f"{one.node.name}: {one.error}" for one in found]
        hints = dict.fromkeys(one.hint for one in found if one.hint)
        raise HostError("\n".join(lines), hint="; ".join(hints))


def _model(path: str, found: Sequence[FoundHost], copy: Path) -> FoundModel:
    try:
        config = json.loads((copy / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        where = ", ".join(one.node.name for one in found if not one.error)
        raise InputError(
            f"{path}/config.json is on none of {where}, or cannot be read",
            hint=f"hf download ORGANISATION/NAME --local-dir {path}",
        ) from error
    try:
        renderer = Renderer(copy)
    except LibraError as error:
        said = str(error).replace(str(copy), path)
        return model_of(path, config, [f"its chat template cannot be used: {said}"])
    told = [f"tool calls are read as {renderer.tool_format}"]
    told += [f"its chat template {one}" for one in renderer.misfits]
    lacking = [one.node.name for one in found if not one.error and not one.model]
    if lacking:
        told.append(f"not yet on {', '.join(lacking)}: libra setup copies it")
    return model_of(path, config, told)


# -- the recipe ------------------------------------------------------------------------------------


def _chosen(order: InitOrder, found: Sequence[FoundHost], model: FoundModel | None) -> str:
    """The text of the first recipe that fits."""
    if model is None:
        return _rendered(order, found, None, None)
    text = ""
    nodes = nodes_for(found, small=False)
    on_gpus, shared = any(node.gpus for node in nodes), any(node.share for node in nodes)
    for size in sizes_for(model, on_gpus=on_gpus, shared=shared):
        text = _rendered(order, found, model, size)
        recipe = Recipe.model_validate(yaml.safe_load(text))
        if model.shape is None or fits(recipe, model.shape, found):
            return text
    raise InputError(
        f"{model.path} ({model.notes[0]}) cannot be trained on these hosts: not even an adapter of "
        "it fits their memory",
        hint="name more hosts, or a smaller model",
    )


def _rendered(
    order: InitOrder,
    found: Sequence[FoundHost],
    model: FoundModel | None,
    size: SizeChoice | None,
) -> str:
    nodes = nodes_for(found, small=model is None)
    on_gpus = any(node.gpus for node in nodes)
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["yaml"] = _scalar
    return environment.from_string(template(_TEMPLATE)).render(
        name=_run_name(order.recipe.stem),
        schema=_schema_file(order).name if order.schema else "",
        small=model is None,
        nodes=nodes,
        left_out=[_one_line(line) for line in left_out(found, nodes)],
        open_nodes=on_gpus and not any(node.slots or node.share for node in nodes),
        share=size.share if size is not None else SHARES[0],
        on_gpus=on_gpus,
        model=model,
        size=size,
        environment=_environment(model),
        environments=[one for one in installed_environments() if one != _environment(model)],
    )


def _run_name(stem: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:64]
    return name if name not in ("", "recipe") else "first"


def _environment(model: FoundModel | None) -> str:
    return "calculator" if model else "pointer-chase"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).partition("\n")[0]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _schema_file(order: InitOrder) -> Path:
    return order.recipe.with_suffix(".schema.json")


def _write(order: InitOrder, text: str) -> None:
    """Write what a dry run accepts; whatever goes wrong, a recipe that was there stays."""
    unfinished = order.recipe.with_name(f".{order.recipe.name}.new")
    try:
        unfinished.write_text(text, encoding="utf-8")
        plan_of(unfinished)
        os.replace(unfinished, order.recipe)
        if order.schema:
            _schema_file(order).write_text(json.dumps(recipe_schema(), indent=2), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{order.recipe} cannot be written: {error.strerror}",
            hint="libra init -o FILE, where you may write",
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _result(order: InitOrder, found: Sequence[FoundHost], model: FoundModel | None) -> InitResult:
    lines = [f"{one.node.name}: {in_words(one)}; {_python(one)}" for one in found if not one.error]
    if model is not None:
        lines.append(f"{model.path}: {'; '.join(model.notes)}")
    nodes = nodes_for(found, small=model is None)
    answered = [one for one in found if not one.error]
    lines += left_out(answered, nodes)
    recipe = shlex.quote(str(order.recipe))
    ready = all(one.is_prepared or one.node.is_local for one in answered)
    ready = ready and (model is None or all(one.model for one in answered))
    return InitResult(
        tuple(lines),
        tuple((f"{one.node.name}: {one.error}", one.hint) for one in found if one.error),
        (f"libra {'doctor' if ready else 'setup'} {recipe}", f"libra run {recipe}"),
    )


def _python(one: FoundHost) -> str:
    if not one.python:
        return "no Python of libra's yet"
    missing = "" if one.is_prepared else ", without all that a run needs"
    return f"Python {one.python}{missing}"
