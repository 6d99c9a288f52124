"""All checks on all hosts, as ``libra doctor`` makes them; nothing of it is left on any host.

    connect -> what hosts tell, and their torch -> data between hosts -> all-reduces -> template

Hosts work in parallel; what is between two hosts is measured in rounds, in which no host takes part
twice, so that numbers are those of a pair alone.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from libra_cli.config.errors import HostError, LibraError
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.preflight.case import PreflightCase, all_packages
from libra_cli.core.preflight.checks import examine
from libra_cli.core.preflight.findings import Finding
from libra_cli.core.preflight.host_report import (
    AllReduce,
    FabricReport,
    HostReport,
    TeacherReport,
    TemplateReport,
    Transfer,
)
from libra_cli.core.preflight.probes import ALL_REDUCE_BYTES, all_reduce_probe
from libra_cli.core.types import Plan, node_of
from libra_cli.runtime.credentials.authority import peer_url
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.hosts.exits import error_in
from libra_cli.runtime.teacher import Teacher
from libra_cli.runtime.weights.fabric import tried

SEND_S = 0.5
"""How long data is sent from one host to another."""
ALL_REDUCE_S = 120.0
"""Seconds for two imports of torch on slow disks, and for the ranks' own time-out."""
LEASE_S = 60.0
Pairs: TypeAlias = tuple[tuple[str, str], ...]


class Examination:
    """One examination of all hosts of a recipe, with agents of its own on them."""

    def __init__(
        self, recipe: Recipe, plan: Plan, recipe_path: str, *, on_stage: Callable[[str], None]
    ) -> None:
        """Connect to nothing yet; ``on_stage`` is called with what is being done."""
        run = recipe.run.model_copy(update={"lease_s": LEASE_S})
        self._recipe = recipe.model_copy(update={"run": run})
        self._plan = plan
        self._on_stage = on_stage
        self._cluster = Cluster(
            self._recipe,
            plan,
            run_id=f"doctor-{secrets.token_hex(4)}",
            secrets=RunSecrets.new(),
            save=lambda record: None,
            clock=time.time,
            recipe_path=recipe_path,
        )
        self._open: list[NodeSpec] = []
        #: Of the policy's model, once its chat template has been tried.
        self._renderer: Renderer | None = None

    async def run(self) -> list[Finding]:
        """Examine all hosts, return what was found, and leave nothing on them."""
        try:
            return examine(await self._case(), quick=False)
        finally:
            self._on_stage("clearing up")
            await self._cluster.close(remove_logs=True)

    async def clear_remains(self, hosts: Sequence[str]) -> dict[str, str]:
        """Remove what dead runs have left on these hosts; by host what is gone, or what failed."""
        nodes = [node for node in self._recipe.nodes if node.name in hosts]
        gone: dict[str, list[str]] = {}

        async def clear(node: NodeSpec) -> None:
            await self._cluster.connect(node)
            await self._cluster.look(node, imports=None)
            facts = self._cluster.reports[node.name].facts
            names = [one.name for one in facts.remains] if facts else []
            gone[node.name] = await self._cluster.hosts[node.name].clear(names)

        try:
            await self._each(nodes, clear)
        finally:
            await self._cluster.close(remove_logs=True)
        return {
            node.name: f"removed what is left of {', '.join(gone[node.name]) or 'nobody'}"
            if node.name in gone
            else self._cluster.reports[node.name].error
            for node in nodes
        }

    async def _case(self) -> PreflightCase:
        cluster = self._cluster
        self._on_stage("connecting to the hosts")
        await self._each(self._recipe.nodes, cluster.connect)
        self._open = self._good()
        self._on_stage("asking the hosts, and loading torch on them")
        await self._each(self._open, self._look)
        self._open = self._good()
        self._on_stage("measuring the network")
        transfers = await self._transfers()
        self._on_stage("trying an all-reduce")
        all_reduces = await self._all_reduces()
        fabric = await self._fabric()
        self._on_stage("trying the chat template")
        template = await self._template()
        teacher = await self._teacher()
        return replace(
            cluster.case(),
            transfers=transfers,
            all_reduces=all_reduces,
            fabric=fabric,
            template=template,
            teacher=teacher,
        )

    async def _look(self, node: NodeSpec) -> None:
        imports = None if node.only_plays else all_packages(self._recipe)
        await self._cluster.look(node, imports=imports)

    async def _each(
        self, nodes: Sequence[NodeSpec], phase: Callable[[NodeSpec], Coroutine[Any, Any, None]]
    ) -> None:
        """Run a phase on all nodes at once; where it fails, the error becomes the node's report."""

        async def one(node: NodeSpec) -> None:
            try:
                await phase(node)
            except LibraError as error:
                told = str(error).removeprefix(f"{node.name}: ")
                self._cluster.reports[node.name] = HostReport(error=told, hint=error.hint)

        await asyncio.gather(*(one(node) for node in nodes))

    def _good(self) -> list[NodeSpec]:
        reports = self._cluster.reports
        return [
            node
            for node in self._recipe.nodes
            if node.name not in reports or not reports[node.name].error
        ]

    @property
    def _with_slots(self) -> list[NodeSpec]:
        return [node for node in self._open if not node.only_plays]

    # -- between hosts --------------------------------------------------------------------------

    async def _transfers(self) -> tuple[Transfer, ...]:
        measured: list[Transfer] = []
        for pairs in rounds([node.name for node in self._with_slots], ring=True):
            measured += await asyncio.gather(*(self._transfer(*pair) for pair in pairs))
        return tuple(measured)

    async def _transfer(self, source: str, target: str) -> Transfer:
        sender, receiver = self._cluster.hosts[source], self._cluster.hosts[target]
        first, last = self._recipe.node(source).port_range
        try:
            (port,) = await sender.ports(first, last, 1)
            address = self._cluster.facts[source].peer_address
            await sender.send_bandwidth(address.listens_at, port, SEND_S)
            url = peer_url(address.serves_at, port, source)
            size, seconds = await receiver.receive_bandwidth(url)
        except HostError as error:
            return Transfer(source, target, error=str(error).removeprefix(f"{target}: "))
        return Transfer(source, target, size, seconds)

    async def _all_reduces(self) -> tuple[AllReduce, ...]:
        case = self._cluster.case()
        names = [node.name for node, facts in case.of_half("train") if "torch" in facts.packages]
        tried: list[AllReduce] = []
        for pairs in rounds(names, ring=False):
            tried += await asyncio.gather(*(self._all_reduce(*pair) for pair in pairs))
        return tuple(tried)

    async def _all_reduce(self, first: str, second: str) -> AllReduce:
        nodes = [self._recipe.node(name) for name in (first, second)]
        facts = self._cluster.facts
        backend = "nccl" if all(node.gpus for node in nodes) else "gloo"
        done = AllReduce((first, second), backend, facts[first].interface, ALL_REDUCE_BYTES)
        try:
            (port,) = await self._cluster.hosts[first].ports(*nodes[0].port_range, 1)
            specs = [
                all_reduce_probe(
                    node,
                    facts[node.name],
                    backend=backend,
                    rank=rank,
                    address=facts[first].address,
                    port=port,
                )
                for rank, node in enumerate(nodes)
            ]
            told, _ = await asyncio.gather(
                self._cluster.answer_of(specs[0], timeout_s=ALL_REDUCE_S),
                self._cluster.run_to_end(specs[1], timeout_s=ALL_REDUCE_S),
            )
        except LibraError as error:
            return replace(done, error=error_in(str(error)))
        return replace(done, seconds=float(told["seconds"]))

    async def _fabric(self) -> FabricReport | None:
        interface = self._recipe.weight_sync.trusted_interface
        names = [node.name for node in self._with_slots]
        if interface is None or len(names) < 2:
            return None
        self._on_stage(f"trying a process group over {interface}")
        return await tried({name: self._cluster.hosts[name] for name in names}, interface)

    # -- the model ------------------------------------------------------------------------------

    async def _template(self) -> TemplateReport | None:
        model, reports = self._recipe.model, self._cluster.reports
        path = model.path
        head = node_of(self._plan.train[0])
        if path is None or head not in reports or reports[head].model is None:
            return None
        await self._cluster.models.place()
        with tempfile.TemporaryDirectory() as place:
            try:
                await self._cluster.models.fetch_tokenizer(Path(place))
                renderer = await asyncio.to_thread(
                    Renderer,
                    Path(place),
                    template_args=model.template_args,
                    tool_format=model.tool_format,
                )
            except LibraError as error:
                return TemplateReport(str(error).replace(place, path), error.hint)
        self._renderer = renderer
        notes = tuple(note.replace(place, path) for note in renderer.notes)
        return TemplateReport(
            tool_format=renderer.tool_format, misfits=renderer.misfits, notes=notes
        )

    async def _teacher(self) -> TeacherReport | None:
        spec, renderer = self._recipe.teacher, self._renderer
        if spec is None or spec.served is not None:  # it is started with the run
            return None
        self._on_stage("asking the teacher")
        teacher = Teacher(spec)
        try:
            name = await teacher.check(renderer, max_len=self._recipe.model.max_len)
        except LibraError as error:
            return TeacherReport(str(error), error.hint)
        finally:
            await teacher.close()
        return TeacherReport(model=name, compared=renderer is not None)


def rounds(names: Sequence[str], *, ring: bool) -> list[Pairs]:
    """Deal pairs of neighbours to rounds, in none of which a host is in two pairs; ``ring`` adds
    the pair of the last and the first.

    A ring of two has a pair in each direction.
    """
    pairs = list(itertools.pairwise(names))
    if ring and len(names) > 1:
        pairs.append((names[-1], names[0]))
    found: list[list[tuple[str, str]]] = []
    for pair in pairs:
        free = (one for one in found if not {*pair} & {name for other in one for name in other})
        chosen = next(free, None)
        if chosen is None:
            found.append(chosen := [])
        chosen.append(pair)
    return [tuple(one) for one in found]
