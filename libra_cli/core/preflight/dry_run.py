"""What a recipe would start where, without asking any host.

It gives the very commands of a run. What only a host can tell stands there in angle brackets, and
the value of every variable whose name sounds secret is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from libra_cli.config.recipe import NodeSpec, Recipe, WeightSyncSpec
from libra_cli.config.secrets import SECRET_NAME
from libra_cli.core.frozen.process import frozen_process
from libra_cli.core.frozen.slots import frozen_slots
from libra_cli.core.launch.model import model_process
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.launch.ports import ports_needed
from libra_cli.core.launch.process import HostFacts, ProcessSpec
from libra_cli.core.launch.rollout_backend import server_process
from libra_cli.core.launch.trainer_backend import (
    TrainerLaunch,
    WorkerLaunch,
    trainer_processes,
    worker_process,
)
from libra_cli.core.types import Plan, Role, Slot


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One host's part of a dry run. Every environment is masked."""

    node: NodeSpec
    slots: tuple[tuple[Slot, str], ...]
    """Each slot with what it will do, for example ``rollout: short``."""
    processes: tuple[ProcessSpec, ...]


def dry_run(
    recipe: Recipe,
    facts: Mapping[str, HostFacts] | None = None,
    *,
    placed: tuple[Plan, Sequence[Slot]] | None = None,
) -> tuple[HostPlan, ...]:
    """Return slots, argv, environment and ports of everything a plan would start, host by host.

    ``facts`` replace the guesses for the nodes that are known; ``placed`` is the plan with its
    slots, instead of the recipe's own split.
    """
    plan, slots = placed or (initial_plan(recipe), slots_of(recipe))
    guessed = {node.name: guessed_facts(node, recipe.weight_sync) for node in recipe.nodes}
    known = guessed | dict(facts or {})
    specs = _processes(recipe, plan, slots, known)
    roles = {slot: f"rollout: {bucket.name}" for slot, bucket in plan.servers}
    roles |= dict.fromkeys(plan.train, "train") | dict.fromkeys(plan.gradient, "gradient")
    frozen = frozen_slots(recipe.models, recipe.nodes)
    roles |= {one.slot.id: f"model: {one.model.name}" for one in frozen}
    slots = (*slots, *(one.slot for one in frozen))
    return tuple(
        HostPlan(
            node=node,
            slots=tuple((s, roles.get(s.id, Role.IDLE)) for s in slots if s.node == node.name),
            processes=tuple(
                replace(spec, env=masked(spec.env)) for spec in specs if spec.node == node.name
            ),
        )
        for node in recipe.nodes
    )


def guessed_facts(node: NodeSpec, weight_sync: WeightSyncSpec) -> HostFacts:
    """Return facts that a host would probably report, with placeholders in angle brackets."""
    workdir = node.workdir
    python = node.python or ("<this python>" if node.is_local else "~/.libra/venv/bin/python")
    return HostFacts(
        node=node.name,
        python=python,
        workdir=workdir,
        run_dir=f"{workdir}/runs/<run>/{node.name}",
        weights_dir=weight_sync.directory or f"/dev/shm/libra-{node.user or '<user>'}",
        tmp_dir="<a new directory in /tmp>",
        address=node.reach,
        interface="<interface to the peers>",
        cpus=None,
    )


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the values of names that sound secret replaced, sorted by name."""
    return {
        name: "******" if SECRET_NAME.search(name) and not name.endswith("_FILE") else value
        for name, value in sorted(env.items())
    }


def _processes(
    recipe: Recipe, plan: Plan, known: Sequence[Slot], facts: Mapping[str, HostFacts]
) -> list[ProcessSpec]:
    """Return the processes in the order they are started: the model's builder, frozen models,
    servers, trainer, gradient workers.
    """
    slots = {slot.id: slot for slot in known}
    ports = _first_ports(recipe, plan)
    model_dirs = {
        node: recipe.model.path or f"{there.workdir}/models/<built>"
        for node, there in facts.items()
    }
    head = slots[plan.train[0]].node
    specs = [model_process(recipe, facts[head])] if recipe.model.build is not None else []
    specs += [
        frozen_process(one, facts[one.node.name], path=one.model.path)
        for one in frozen_slots(recipe.models, recipe.nodes)
    ]
    for slot, bucket in ((slots[slot_id], bucket) for slot_id, bucket in plan.servers):
        node = slot.node
        specs.append(server_process(recipe, slot, bucket, facts[node], model_dir=model_dirs[node]))
    launch = TrainerLaunch(
        train=tuple(slots[slot] for slot in plan.train),
        facts=facts,
        run_id="<run>",
        rendezvous_port=ports[head]["rendezvous"],
        model_dirs=model_dirs,
        trainer_incarnation=1,
    )
    specs += trainer_processes(recipe, launch)
    for slot in (slots[slot_id] for slot_id in plan.gradient):
        node = slot.node
        worker = WorkerLaunch(slot, facts[node], "<run>", 1, ports[node], model_dirs[node])
        specs.append(worker_process(recipe, worker))
    return specs


def _first_ports(recipe: Recipe, plan: Plan) -> dict[str, dict[str, int]]:
    """The first of each node's range; a run takes the first that are free."""
    return {
        node: dict(zip(names, range(recipe.node(node).port_range[0], 65536), strict=False))
        for node, names in ports_needed(recipe, plan).items()
    }
