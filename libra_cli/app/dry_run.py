"""``libra run --dry-run``: what would be started where, and what it would take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.app.idle_servers import PlannedRun
from libra_cli.app.resume import begin_with
from libra_cli.config.errors import InputError, LibraError, RecipeError
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.config.speculative import SpeculativeSpec
from libra_cli.core.costs.architecture import architecture_of, published
from libra_cli.core.costs.mixtures import refused_routes
from libra_cli.core.costs.tensor_parallel import allowed_degrees, refused_degree
from libra_cli.core.launch.memory_table import MemoryLine, memory_table, unfit
from libra_cli.core.preflight.draft_heads import refused_drafts
from libra_cli.core.preflight.dry_run import HostPlan, dry_run
from libra_cli.core.preflight.families import refused_family
from libra_cli.core.preflight.host_report import ModelFiles
from libra_cli.core.preflight.needs import draft_head
from libra_cli.core.preflight.quantization import refused_quantization
from libra_cli.core.types import Plan, Slot, node_of
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.tasks.mixture import Tasks

_TRAIN = (
    "train on more GPUs, or shrink weights, gradients and moments with training.lora or "
    "training.optimizer: adamw_offload, activations with training.activation_checkpointing: full"
)
_SERVE = (
    "give servers more GPUs (slots with more, and rollout.buckets[].tensor_parallel), or lower "
    "model.max_len"
)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What ``libra run --dry-run`` shows: the plan, each host's processes, memory and tasks."""

    plan: Plan
    hosts: tuple[HostPlan, ...]
    memory: tuple[str, ...]
    """What the memory of each kind of process goes to, in lines."""
    tasks: tuple[str, ...]
    """How many tasks were read for each environment that has files of them, in lines."""
    versions: tuple[str, ...] = ()
    """How versions reach other hosts, where the recipe trusts an interface for it, in lines."""
    unfit: tuple[MemoryLine, ...] = ()
    """The kinds of processes that fit no GPU."""
    advice: tuple[str, ...] = ()
    """What would make steps faster that only the recipe can say, in sentences."""


def plan_of(recipe_path: Path, resume: Path | None = None) -> tuple[Recipe, DryRun]:
    """``libra run --dry-run``: what would be started where, to ``resume`` a run or to begin one.

    Starts nothing and asks no host.

    Raises:
        RecipeError: every problem of the recipe at once.
        LibraError: nothing runs by the prices that the recipe names, there is no such run, a file
            of tasks is damaged, or a config.json that is here forbids a server of the plan.
    """
    recipe = load_recipe(recipe_path)
    tasks = tuple(
        f"{label}: {len(Tasks(environment.tasks))} tasks from "
        + ", ".join(source.path for source in environment.tasks)
        for label, environment in zip(recipe.environment_labels, recipe.environment, strict=True)
        if environment.tasks
    )
    if recipe.demonstrations:
        tasks = (_told_demonstrations(recipe),)
    found = begin_with(recipe, resume)(None)
    placed = (found.plan, found.slots)
    file = Path(recipe.model.path or "").expanduser() / "config.json"
    if recipe.training.rollout_routes:
        _check_routes(file)
    degrees = {bucket.tensor_parallel for _, bucket in found.plan.servers}
    quantized = recipe.rollout.quantization is not None
    _check_model(file, degrees, quantized=quantized, images=recipe.model.images)
    _check_drafts(recipe.rollout.speculative, recipe.nodes, file)
    hosts = dry_run(recipe, placed=placed)
    interface, names = recipe.weight_sync.trusted_interface, [n.name for n in recipe.slot_nodes]
    versions = _told_versions(interface, node_of(found.plan.train[0]), names)
    memory = _memory_of(recipe, *placed)
    advice = PlannedRun(recipe, *placed).advice_beforehand()
    told = tuple(line.text for line in memory)
    return recipe, DryRun(found.plan, hosts, told, tasks, versions, tuple(unfit(memory)), advice)


def refuse_unfit(path: Path, told: DryRun) -> None:
    """Raise RecipeError if a process of the plan fits no GPU; the plan and its memory were told."""
    if not told.unfit:
        return
    names = ", ".join(line.process for line in told.unfit)
    instead = dict.fromkeys(_SERVE if line.kind == "server" else _TRAIN for line in told.unfit)
    raise RecipeError(
        f"{path}: no GPU has the memory for: {names}",
        hint=f"{'; '.join(instead)}; then: libra run --dry-run {path}",
    )


def _told_versions(interface: str | None, head: str, nodes: Sequence[str]) -> tuple[str, ...]:
    others = [node for node in nodes if node != head]
    if interface is None:
        return ()
    if not others:
        return (f"nothing goes over {interface}: there is no other host",)
    told = (
        f"from {head} along {', '.join(others)}, as far as they are up, by gloo over {interface}: "
        "not encrypted, each chunk checked; what does not come so is pulled over TLS"
    )
    return (told,)


def _told_demonstrations(recipe: Recipe) -> str:
    rows, steps = len(Tasks(recipe.demonstrations)), recipe.run.steps
    batch = recipe.trajectories_per_step
    return (
        f"demonstrations: {rows:,} conversations from "
        f"{', '.join(source.path for source in recipe.demonstrations)}; {steps:,} steps of {batch} "
        f"are {steps * batch / rows:.1f} epochs"
    )


def _check_model(file: Path, degrees: Set[int], *, quantized: bool, images: bool) -> None:
    try:
        config = _config_in(file)
    except (OSError, ValueError):
        return
    if refused := refused_family(config, images=images):
        raise InputError(f"{file.parent} cannot be trained: {refused.why}", hint=refused.instead)
    if quantized and (reason := refused_quantization(config)):
        raise InputError(
            f"rollout.quantization is not for {file.parent}: {reason}",
            hint="leave out rollout.quantization",
        )
    for degree in sorted(degrees):
        if reason := refused_degree(config, degree):
            allowed = ", ".join(map(str, allowed_degrees(config)))
            raise InputError(
                f"vLLM cannot divide {file.parent} among the {degree} GPUs of a server: {reason}",
                hint=f"rollout.buckets[].tensor_parallel: one of {allowed}",
            )


def _check_drafts(
    speculative: SpeculativeSpec | None, nodes: Sequence[NodeSpec], file: Path
) -> None:
    if speculative is None:
        return
    policy = _config_here(file)
    head = _config_here(Path(speculative.model) / "config.json") if speculative.model else {}
    serving = [node for node in nodes if {*node.slot_pools} - {"train"}]
    on_cpus = any(not node.gpus for node in serving)
    if reason := refused_drafts(speculative, policy, head, on_cpus=on_cpus):
        raise InputError(
            f"rollout.speculative.method: {speculative.method} is not for {file.parent}: {reason}",
            hint="rollout: {speculative: null}, or {method: ngram}",
        )


def _config_here(file: Path) -> Mapping[str, Any]:
    """Return a model's config.json; empty if it is not on this machine, or holds no object."""
    try:
        return _config_in(file)
    except (OSError, ValueError):
        return {}


def _check_routes(file: Path) -> None:
    try:
        reason = refused_routes(_config_in(file))
    except (OSError, ValueError):
        return
    if reason:
        raise InputError(
            f"training.rollout_routes is not for {file.parent}: {reason}",
            hint="training: {rollout_routes: false}",
        )


def _config_in(file: Path) -> Mapping[str, Any]:
    """Return a model's config.json, empty if it holds no object; raises OSError or ValueError."""
    found = json.loads(file.read_bytes())
    return found if isinstance(found, dict) else {}


def _files_in(directory: Path) -> ModelFiles | None:
    """Return the sizes of a model's files without their fingerprints; None if it is not here."""
    config = _config_here(directory / "config.json")
    if not config:
        return None
    return ModelFiles({one.name: (one.stat().st_size, "") for one in directory.iterdir()}, config)


def _memory_of(recipe: Recipe, plan: Plan, slots: tuple[Slot, ...]) -> tuple[MemoryLine, ...]:
    if recipe.model.path is None:
        return ()
    file = Path(recipe.model.path).expanduser() / "config.json"
    name = Path(recipe.model.path).name
    try:
        shape = architecture_of(_config_in(file), str(file))
        source = f"by {file}"
    except (OSError, ValueError, LibraError) as error:
        problem = (
            "is not on this machine" if isinstance(error, OSError) else f"says too little: {error}"
        )
        known = published(name)
        if known is None:
            return (MemoryLine(f"what memory goes to is not known: {file} {problem}"),)
        shape = known
        source = f"{file} {problem}; by what is published of {name}"
    said = f"{source}: {shape.parameters / 1e9:.1f} billion parameters"
    if shape.active_parameters < shape.parameters:
        said += f", of which a token meets {shape.active_parameters / 1e9:.1f}"
    shape = shape.with_adapter(recipe.training.lora)
    if shape.adapter is not None:
        said += f", of an adapter {shape.adapter / 1e6:.1f} million, which are trained"
    speculative = recipe.rollout.speculative
    given = speculative.model if speculative is not None else None
    head = draft_head(speculative, shape, _files_in(file.parent), _files_in(Path(given or "-")))
    if given is not None and head is None:
        said += f"; {given} is not on this machine, and what it takes of servers is not counted"
    return (MemoryLine(said), *memory_table(recipe, plan, slots, shape, head))
