"""Prepares all hosts of a recipe side by side: Python environment, then the model.

Nothing of libra has to be there before: all it needs of a host is a shell. What is right already is
left as it is, so it may be repeated, and goes on where it broke off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from libra_cli.config.errors import HostError, LibraError
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.preflight.model_checks import COUNTED
from libra_cli.runtime.doctor.environment import HostEnvironment, Packages
from libra_cli.runtime.doctor.remote_files import (
    FileSource,
    HostFiles,
    LocalFiles,
    copy_missing,
    expanded,
)
from libra_cli.runtime.hosts.cluster import transport_to
from libra_cli.runtime.hosts.transport import Transport


class SetupProgress(Protocol):
    """Shows somebody how far ``Setup`` is on each host."""

    def stage(self, host: str, what: str) -> None:
        """Show what is being done on a host now."""

    def bytes(self, host: str, count: int) -> None:
        """Count bytes that have been copied there; negative if they come again."""


@dataclass(frozen=True, slots=True)
class SetupResult:
    """What was done on one host, and what failed there."""

    host: str
    done: tuple[str, ...]
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class _ModelSource:
    """Where the model is copied from: the ``host``, empty for the controller, and its files."""

    host: str
    files: FileSource
    hashes: Mapping[str, str]
    """The SHA-256 of every file, by name."""


class Setup:
    """One preparation of some hosts of a recipe."""

    def __init__(
        self,
        recipe: Recipe,
        progress: SetupProgress,
        *,
        environments: Collection[str],
        models: Collection[str],
    ) -> None:
        """Make the environments of some hosts, and copy the model to some."""
        self._recipe = recipe
        self._environments = environments
        self._models = models
        hosts = {*environments, *models}
        self._nodes = [node for node in recipe.nodes if node.name in hosts]
        self._progress = progress
        self._transports: dict[str, Transport] = {}
        self._done: dict[str, list[str]] = {node.name: [] for node in self._nodes}
        self._failed: dict[str, LibraError] = {}

    async def run(self, packages_of: Callable[[NodeSpec], Packages]) -> list[SetupResult]:
        """Prepare the hosts; ``packages_of`` says what each gets. What fails is told by host."""

        async def environment(node: NodeSpec) -> None:
            await self._environment(node, packages_of(node))

        try:
            await self._each(self._recipe.nodes, self._connect)
            await self._each(self._chosen(self._environments), environment)
            if self._models and self._recipe.model.path is not None:
                await self._copy_models(self._recipe.model.path)
        finally:
            await asyncio.gather(*(one.close() for one in self._transports.values()))
        return [self._result(node.name) for node in self._nodes]

    def _chosen(self, hosts: Collection[str]) -> list[NodeSpec]:
        return [node for node in self._nodes if node.name in hosts]

    def _result(self, name: str) -> SetupResult:
        error = self._failed.get(name)
        self._progress.stage(name, "failed" if error else "done")
        told, hint = (str(error), error.hint) if error else ("", "")
        return SetupResult(name, tuple(self._done[name]), told, hint)

    async def _each(
        self, nodes: Collection[NodeSpec], work: Callable[[NodeSpec], Awaitable[None]]
    ) -> None:
        async def one(node: NodeSpec) -> None:
            if node.name in self._failed:
                return
            try:
                await work(node)
            except LibraError as error:
                self._failed[node.name] = error

        await asyncio.gather(*(one(node) for node in nodes))

    async def _connect(self, node: NodeSpec) -> None:
        self._progress.stage(node.name, "connecting")
        transport = self._transports[node.name] = transport_to(node)
        await transport.connect()

    async def _environment(self, node: NodeSpec, packages: Packages) -> None:
        if node.is_local:
            self._done[node.name].append("this machine's Python is left as it is")
            return
        made = HostEnvironment(node, self._transports[node.name])
        told = await made.make(
            packages,
            on_stage=lambda what: self._progress.stage(node.name, what),
            on_bytes=lambda count: self._progress.bytes(node.name, count),
        )
        self._done[node.name].append(told)

    # -- the model ------------------------------------------------------------------------------

    async def _copy_models(self, path: str) -> None:
        try:
            found = await self._source(path)
        except LibraError as error:
            self._failed |= {
                node.name: HostError(f"{node.name}: {error}", hint=error.hint)
                for node in self._chosen(self._models)
                if node.name not in self._failed
            }
            return

        async def copy(node: NodeSpec) -> None:
            if node.name != found.host:
                await self._copy(node, path, found)

        await self._each(self._chosen(self._models), copy)

    async def _source(self, path: str) -> _ModelSource:
        """The controller's directory, or else the first host's that has it, in recipe order; a host
        where it cannot be read has failed.

        Raises:
            InputError: the controller's cannot be read.
            HostError: nobody has it, or not one that can be read; the message is the first
                host's that could not.
        """
        failed: list[HostError] = []
        if (here := await asyncio.to_thread(_model_here, path)) is not None:
            return await self._hashed("", LocalFiles(here))
        for node in self._recipe.nodes:
            if node.name in self._failed:
                continue
            transport = self._transports[node.name]
            place = expanded(transport, path)
            try:
                done = await transport.run(["test", "-e", f"{place}/config.json"], timeout_s=30.0)
                if done.exit_code == 0:
                    return await self._hashed(node.name, HostFiles(transport, place))
            except HostError as error:
                failed.append(error)
                self._failed[node.name] = error
        if failed:
            raise failed[0]
        asked = "any host that answers" if self._failed else "any host"
        raise HostError(
            f"{path} is neither here nor on {asked}",
            hint=f"here: hf download ORGANISATION/NAME --local-dir {path}",
        )

    async def _hashed(self, host: str, files: FileSource) -> _ModelSource:
        for node in self._chosen(self._models):
            self._progress.stage(node.name, "hashing the model")
        return _ModelSource(host, files, await files.hashes())

    async def _copy(self, node: NodeSpec, path: str, found: _ModelSource) -> None:
        wanted = found.hashes
        transport = self._transports[node.name]
        place = expanded(transport, path)
        self._progress.stage(node.name, "model")
        copied = await copy_missing(
            found.files,
            wanted,
            transport,
            place,
            on_bytes=lambda count: self._progress.bytes(node.name, count),
        )
        extra = sorted({*await HostFiles(transport, place).hashes()} - {*wanted})
        if extra := [name for name in extra if name.endswith(COUNTED)]:
            raise HostError(
                f"{node.name}: {place} has {extra[0]}, which the model does not have",
                hint=f"on {node.name}: rm {' '.join(f'{place}/{name}' for name in extra)}",
            )
        told = f"{len(copied)} of {len(wanted)} files copied" if copied else "was there, whole"
        self._done[node.name].append(f"{path}: {told}")


def _model_here(path: str) -> Path | None:
    """The model's directory on the controller; None if it is not there, or nobody may look."""
    here = Path(path).expanduser()
    with suppress(PermissionError):
        return here if (here / "config.json").is_file() else None
    return None
