"""Checks whether a host can do its part of a plan, before anything is started on it."""

from __future__ import annotations

from collections.abc import Iterator

from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.launch.rollout_backend import rollout_backend
from libra_cli.core.launch.trainer_backend import trainer_backend
from libra_cli.core.types import Plan, node_of
from libra_cli.runtime.hosts.agent_messages import Gpu, NodeFacts

MAX_CLOCK_SKEW_S = 5.0
MIN_SHM_BYTES = 256 * 2**20


def problems(
    recipe: Recipe, plan: Plan, node: NodeSpec, seen: NodeFacts, *, now: float
) -> list[str]:
    """Return every reason why this host cannot do its part, each with what to do about it.

    ``now`` is the controller's clock in seconds since the epoch.
    """
    return [
        *_packages(recipe, plan, node, seen),
        *_gpus(node, seen),
        *_model(recipe, seen),
        *_room(seen),
        *_clock(seen, now),
    ]


def packages_needed(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The Python packages that each half needs on its hosts."""
    return {
        "rollout": rollout_backend(recipe.rollout.backend).packages,
        "train": trainer_backend(recipe.training.backend).packages,
    }


def _halves(plan: Plan, node: NodeSpec) -> list[str]:
    """The halves of a run (``rollout``, ``train``) that a node is part of now or may be later."""
    elastic = bool({"hybrid", "auto"} & set(node.slot_pools))
    serves = elastic or any(node_of(slot) == node.name for slot, _ in plan.servers)
    trains = elastic or any(node_of(slot) == node.name for slot in plan.train)
    return [half for half, used in (("rollout", serves), ("train", trains)) if used]


def _packages(recipe: Recipe, plan: Plan, node: NodeSpec, seen: NodeFacts) -> Iterator[str]:
    packages = packages_needed(recipe)
    needed = {name for half in _halves(plan, node) for name in packages[half]}
    missing = sorted(needed - set(seen.packages))
    if missing:
        extra = "gpu" if node.gpus else "cpu"
        yield (
            f"its python has no {', '.join(missing)}; install them there: "
            f"pip install 'libra-rl[{extra}]'"
        )


def _gpus(node: NodeSpec, seen: NodeFacts) -> Iterator[str]:
    if len(seen.gpus) < node.gpus:
        yield f"the recipe wants {node.gpus} GPUs, nvidia-smi shows {len(seen.gpus)}"
    for gpu in seen.gpus:
        if gpu.index < node.gpus and gpu.holders:
            yield (
                f"GPU {gpu.index} is in use by {_holders(gpu)}; libra never stops what is not its "
                "own: wait, ask, or leave that GPU out"
            )


def _holders(gpu: Gpu) -> str:
    told = (f"{holder.command} (pid {holder.pid}, {holder.user})" for holder in gpu.holders)
    return ", ".join(told)


def _model(recipe: Recipe, seen: NodeFacts) -> Iterator[str]:
    path = recipe.model.path
    if path is not None and path not in seen.paths:
        if path.startswith(("/", "~")):
            yield f"there is no {path}; put the model there, or correct model.path"
        else:
            yield (
                f"model.path {path} is no absolute path, and libra downloads nothing; on the host: "
                f"hf download {path} --local-dir /models/{path.rpartition('/')[2]}"
            )


def _room(seen: NodeFacts) -> Iterator[str]:
    if seen.shm_free < MIN_SHM_BYTES:
        yield (
            f"/dev/shm has {seen.shm_free / 2**20:.0f} MiB free, weight versions need "
            f"{MIN_SHM_BYTES / 2**20:.0f}; free some or set weight_sync.directory"
        )


def _clock(seen: NodeFacts, now: float) -> Iterator[str]:
    skew = abs(seen.clock - now)
    if skew > MAX_CLOCK_SKEW_S:
        yield f"its clock is {skew:.0f} s off the controller's; synchronise them (ntp)"
