"""What servers would earn that take requests while the trainer on their GPUs waits, and the YAML.

They are told of where whole nodes train that do nothing else, the memory law says that a server
fits beside the ranks (``planning.idle_servers.shares_that_fit``), and the planner's prices say that
steps are ``LEAST`` faster with them. It is one sentence, and never done by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import yaml
from pydantic import ValidationError

from libra_cli.app.costs import recipe_planner
from libra_cli.app.first_plan import expected_work
from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import NodeSpec, Recipe, ShareSpec
from libra_cli.core.costs.profile import Profile
from libra_cli.core.evidence import CostEvidence
from libra_cli.core.launch.placement import initial_plan, seats_of
from libra_cli.core.observed.step_work import workload_of
from libra_cli.core.planning.idle_servers import IdleServers, shares_that_fit
from libra_cli.core.planning.search import Search
from libra_cli.core.types import Plan, Slot
from libra_cli.core.workload import Workload
from libra_cli.sim.profiles import load_profile

LEAST = 0.05
"""Share by which steps are to be faster at least. Chosen: prices of plans differ by as much from
what is simulated."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A recipe and a plan of it, beside whose trainer servers might stand."""

    recipe: Recipe
    plan: Plan
    slots: tuple[Slot, ...]

    def advice_beforehand(self) -> tuple[str, ...]:
        """Return ``advice`` for the work that the recipe expects, by the prices that it names; none
        where it names none."""
        name = self.recipe.planner.profile
        if name is None or not self.plan.servers:
            return ()
        shipped = load_profile(name)
        planner = recipe_planner(self.recipe, lambda plan, evidence: shipped, elastic=False)
        work = workload_of(self.recipe, expected_work(self.recipe)[0])
        return self.advice(planner.costs(self.plan, CostEvidence()), work)

    def advice(self, profile: Profile, workload: Workload) -> tuple[str, ...]:
        """Return the sentence on such servers beside this plan; nothing where they do not pay.

        ``profile`` has the prices as the recipe trains, and ``workload`` is what a step plays.
        """
        recipe = self.recipe
        if recipe.training.stream or recipe.model.images or recipe.rollout.speculative is not None:
            return ()
        planner = recipe_planner(recipe, lambda plan, evidence: profile, elastic=False)
        layout = planner.space.layout_of(self.plan, self.slots)
        shares = self._shares(profile, layout.training_gpus)
        written = self._rewritten(shares) if shares else None
        if written is None:
            return ()
        seats, sizes = seats_of(recipe), {node.name: node.gpus for node in recipe.nodes}
        idle = (IdleServers.on(one, sizes[name], 1, seats) for name, one in shares.items())
        shared = replace(layout, workers=(), idle=tuple(idle))
        try:
            search = Search(profile, workload, planner.space.gpus, planner.settings)
        except LibraError:
            return ()
        now, then = (search.times(one).step_s for one in (layout, shared))
        if not (1 + LEAST) * then <= now < inf:  # infinite where the plan does not fit
            return ()
        words = (
            f"servers that take requests on the trainer's GPUs while it waits would make steps "
            f"{now / then - 1:.0%} faster ({then:.1f} s instead of {now:.1f}, predicted), and "
            f"memory holds both; in the recipe: {written}"
        )
        return (words,)

    def _shares(self, profile: Profile, ranks: int) -> dict[str, ShareSpec]:
        """Return the shares of the nodes that might have such a server, by their names."""
        found = {
            node.name: shares_that_fit(profile, node.gpus, ranks, self.recipe.model.max_len)
            for node in self.recipe.nodes
            if self._trains_alone(node)
        }
        return {name: shares for name, shares in found.items() if shares is not None}

    def _trains_alone(self, node: NodeSpec) -> bool:
        """Whether all GPUs of the node train, as gradient workers or not, and nothing shares
        them."""
        train = {*self.plan.train, *self.plan.gradient}
        own = (slot for slot in self.slots if slot.node == node.name and slot.id in train)
        return node.share is None and 0 < node.gpus == sum(len(slot.gpus) for slot in own)

    def _rewritten(self, shares: Mapping[str, ShareSpec]) -> str | None:
        """Return the keys to write, as YAML in one line; None where a recipe cannot have such
        servers beside the rest of the plan."""
        recipe = self.recipe
        told = recipe.model_dump(mode="json", exclude_unset=True)
        every = zip(told["nodes"], recipe.nodes, strict=True)
        nodes = [self._node(given, node, shares) for given, node in every]
        sizes = {node.gpus for node in recipe.nodes if node.name in shares}
        rollout = self._buckets(sizes)
        changed = {"nodes": nodes, **({"rollout": rollout} if rollout else {})}
        try:
            whole = {**told, **changed, "rollout": {**told.get("rollout", {}), **rollout}}
            initial_plan(Recipe.model_validate(whole))
        except (ValidationError, LibraError):
            return None
        words = yaml.safe_dump(changed, default_flow_style=True, sort_keys=False, width=10_000)
        return words.strip().removeprefix("{").removesuffix("}")

    def _node(
        self, given: dict[str, Any], node: NodeSpec, shares: Mapping[str, ShareSpec]
    ) -> dict[str, Any] | None:
        """Return the node as the recipe should have it; of an open one, which serves or trains as a
        whole, with its slots, and None of one that does both."""
        given = {key: value for key, value in given.items() if value is not None}
        bare = {key: value for key, value in given.items() if key not in ("slots", "pool")}
        if node.name in shares:
            return {**bare, "share": shares[node.name].model_dump(mode="json")}
        if not node.is_open:
            return given
        servers, own = dict(self.plan.servers), [s for s in self.slots if s.node == node.name]
        degrees = {servers[slot.id].tensor_parallel for slot in own if slot.id in servers}
        if len(degrees) != 1 or any(slot.id not in servers for slot in own):
            return None
        return {**bare, "slots": node.gpus // degrees.pop(), "pool": "rollout"}

    def _buckets(self, sizes: set[int]) -> dict[str, Any]:
        """Return ``rollout`` with the buckets that are needed; empty where the recipe has them."""
        given = self.recipe.rollout.buckets or ()
        used = set() if given else {bucket.tensor_parallel for _, bucket in self.plan.servers}
        missing = (used | sizes) - {one.tensor_parallel for one in given if one.slots is None}
        if not missing:
            return {}
        seats = seats_of(self.recipe)
        more = [
            {"name": f"TP{size}", "tensor_parallel": size, "max_num_seqs": seats}
            for size in sorted(missing)
        ]
        kept = [one.model_dump(mode="json", exclude_unset=True) for one in given]
        return {"buckets": [*kept, *more]}
