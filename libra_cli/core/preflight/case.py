"""Everything the checks look at: the recipe, its plan, and what hosts told and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from libra_cli.config.frozen_models import POOL
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.launch.rollout_backend import rollout_backend
from libra_cli.core.launch.trainer_backend import trainer_backend
from libra_cli.core.launch.vllm import Vllm
from libra_cli.core.preflight.host_report import (
    AllReduce,
    FabricReport,
    HostReport,
    ModelFiles,
    NamesReport,
    NodeFacts,
    TeacherReport,
    TemplateReport,
    Transfer,
)
from libra_cli.core.preflight.needs import HostNeeds, host_needs
from libra_cli.core.types import Plan, node_of


@dataclass(frozen=True, slots=True)
class PreflightCase:
    """Everything known before a run starts. What was not measured is empty, and has no findings."""

    recipe: Recipe
    plan: Plan
    hosts: Mapping[str, HostReport]
    recipe_path: str = "RECIPE"
    """The recipe's path as it is typed in commands."""
    transfers: tuple[Transfer, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()
    fabric: FabricReport | None = None
    """The result of trying a process group on the trusted interface; None if it was not tried."""
    template: TemplateReport | None = None
    """The result of trying the model's chat template; None if it was not tried."""
    teacher: TeacherReport | None = None
    """The result of asking the teacher, of a recipe that has one."""
    open_files: int | None = None
    """Files that the controller may have open; None without a limit."""

    def looked(self) -> Iterator[tuple[NodeSpec, NodeFacts]]:
        """Yield every node with slots whose facts are known, with these."""
        return ((node, facts) for node, facts in self.everyone() if not node.only_plays)

    def everyone(self) -> Iterator[tuple[NodeSpec, NodeFacts]]:
        """Yield every node whose facts are known, those that only play environments too."""
        for node in self.recipe.nodes:
            facts = self.hosts[node.name].facts if node.name in self.hosts else None
            if facts is not None:
                yield node, facts

    def silent(self) -> list[str]:
        """Return the nodes that did not answer, so that nothing is known of them."""
        names = (node.name for node in self.recipe.nodes)
        reports = ((name, self.hosts[name]) for name in names if name in self.hosts)
        return [name for name, report in reports if report.error and report.facts is None]

    def halves(self, node: NodeSpec) -> tuple[str, ...]:
        """The halves of a run (``rollout``, ``train``) that a node is in now or may be later, and
        ``models`` where it serves frozen ones."""
        elastic = bool({"hybrid", "auto"} & set(node.slot_pools))
        serves = elastic or any(node_of(slot) == node.name for slot, _ in self.plan.servers)
        trains = elastic or any(node_of(slot) == node.name for slot in self.plan.train)
        used = {"rollout": serves, "train": trains, POOL: POOL in node.slot_pools}
        return tuple(half for half, is_used in used.items() if is_used)

    def of_half(self, half: str) -> list[tuple[NodeSpec, NodeFacts]]:
        """The nodes that have told of themselves and are, or may be, in one half of the run."""
        return [(node, facts) for node, facts in self.looked() if half in self.halves(node)]

    @property
    def head(self) -> str:
        """The node of rank 0, which every version comes from."""
        return node_of(self.plan.train[0])

    @property
    def model(self) -> ModelFiles | None:
        """The model as the head has it, or else the first host that has it."""
        names = [self.head, *self.hosts]
        found = (self.hosts[name].model for name in names if name in self.hosts)
        return next((model for model in found if model is not None), None)

    @property
    def head_files(self) -> ModelFiles | None:
        """The head that drafts, as the first host has it that does."""
        found = (report.head for report in self.hosts.values())
        return next((head for head in found if head is not None), None)

    @property
    def names(self) -> NamesReport | None:
        """What the head said of the names of the model's files, if it was asked."""
        return self.hosts[self.head].names if self.head in self.hosts else None

    def needs(self, node: NodeSpec) -> HostNeeds:
        """Return the memory and disk that the run needs on a node."""
        return host_needs(self.recipe, self.plan, node, self.model, self.head_files)

    def seats(self, nodes: Iterable[str]) -> int:
        """The most requests that run on servers of these nodes at the same time."""
        names = set(nodes)
        return sum(
            bucket.max_num_seqs for slot, bucket in self.plan.servers if node_of(slot) in names
        )


def packages_needed(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The Python packages that each half needs on its hosts, and frozen models on theirs."""
    adapter = ("peft",) if recipe.training.lora else ()
    speculative = recipe.rollout.speculative
    drafts = ("arctic_inference",) if speculative and speculative.method == "suffix" else ()
    return {
        "rollout": (*rollout_backend(recipe.rollout.backend).packages, *drafts),
        "train": (*trainer_backend(recipe.training.backend).packages, *adapter),
        POOL: Vllm().packages if recipe.models else (),
    }


def all_packages(recipe: Recipe) -> list[str]:
    """Return the packages that rollout and training need, sorted."""
    return sorted({name for names in packages_needed(recipe).values() for name in names})
