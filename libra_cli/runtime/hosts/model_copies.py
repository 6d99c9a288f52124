"""The model of a run on its hosts: where the recipe has it, or built on one and copied to all."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_cli.config.errors import NONSENSE, HostError, LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.architecture import Architecture, architecture_of
from libra_cli.core.launch.model import model_process
from libra_cli.core.launch.process import HostFacts, ProcessSpec
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.remote_files import fetch_tokenizer, names_in
from libra_cli.runtime.hosts.shipped_model import shipped_model
from libra_cli.runtime.supervision.answers import understood


class ModelCopies:
    """The directories of the model; the node ``head`` builds it where the recipe has none."""

    def __init__(
        self,
        recipe: Recipe,
        head: str,
        hosts: Mapping[str, Host],
        facts: Mapping[str, HostFacts],
        run_to_end: Callable[[ProcessSpec], Coroutine[Any, Any, object]],
    ) -> None:
        """``hosts`` and their ``facts`` are known later; ``run_to_end`` runs a process on one."""
        self._recipe = recipe
        self._head = head
        self._hosts = hosts
        self._facts = facts
        self._run_to_end = run_to_end
        #: Complete once the model is placed.
        self.directories: dict[str, str] = {}

    async def place(self) -> None:
        """Have the model on every open host with slots. Raises LibraError."""
        path = self._recipe.model.path
        if path is not None:
            self.directories = self.expanded(path)
            return
        await self._build()
        wanted = [node.name for node in self._recipe.slot_nodes if node.name != self._head]
        await self._copy_to(wanted)

    async def place_again(self, node: str, *, hint: str) -> None:
        """Have it on a host that has lost it. Raises LibraError, with this hint if nothing can."""
        if self._recipe.model.path is not None:
            raise HostError(f"{node}: {self._recipe.model.path} holds no model any more", hint=hint)
        await (self._build() if node == self._head else self._copy_to([node]))

    async def architecture(self, node: str) -> Architecture | None:
        """The sizes of the model as its directory on a node says; None if it does not."""
        directory = self.directories[node]
        try:
            found = await self._hosts[node].transport.get(f"{directory}/config.json")
            shape = architecture_of(json.loads(found), directory)
            return shape.with_adapter(self._recipe.training.lora)
        except (LibraError, *NONSENSE):
            return None

    def expanded(self, path: str) -> dict[str, str]:
        """A path of the recipe as an absolute one on each open host."""
        return {name: host.expand(path) for name, host in self._hosts.items()}

    async def fetch_tokenizer(self, to: Path) -> None:
        """Copy the tokenizer to this machine, which needs it, and not the weights."""
        transport = self._hosts[self._head].transport
        await fetch_tokenizer(transport, self.directories[self._head], to)

    async def _build(self) -> None:
        host = self._hosts[self._head]
        if (shipped := shipped_model(self._recipe.model.build)) is not None:
            await host.transport.put_tree(shipped.files, f"{host.workdir}/models/{shipped.name}")
        await self._run_to_end(model_process(self._recipe, self._facts[self._head]))
        said = await host.transport.get(f"{host.run_dir}/model.json")
        with understood(HostError, f"{self._head}: model.json"):
            self.directories[self._head] = str(json.loads(said)["model_dir"])

    async def _copy_to(self, nodes: Sequence[str]) -> None:
        """Copy the built model from the head to these nodes."""
        if not nodes:
            return
        source, transport = self.directories[self._head], self._hosts[self._head].transport
        names = await names_in(transport, source)
        files = {name: await transport.get(f"{source}/{name}") for name in names}
        for name in nodes:
            target = f"{self._hosts[name].workdir}/models/{Path(source).name}"
            await self._hosts[name].transport.put_tree(files, target)
            self.directories[name] = target
