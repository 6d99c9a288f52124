"""The saved adapters that servers hold, which are few: those that were sampled from last.

Any of them may be let go of while nobody samples from it, since it is loaded again from its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from libra_cli.config.errors import LibraError
from libra_cli.runtime.tinker.adapters import SavedAdapters

ADAPTERS_IN_MEMORY = 32
"""Adapters that a server keeps at hand; chosen."""


class AdapterServers(Protocol):
    """What holds adapters (``libra_cli.runtime.tinker.hosts.TinkerHosts``)."""

    async def add_adapter(self, name: str, config: str, tensors: bytes) -> None:
        """Give every server an adapter to sample from."""

    async def remove_adapter(self, name: str) -> None:
        """Have every server let go of an adapter."""


@dataclass(slots=True)
class _Loaded:
    name: str
    """What servers call it: of what was saved anew under its path, another name."""
    users: int = 0
    dropped: bool = False


class LoadedAdapters:
    """The adapters on the servers, by their paths; the one that was used last is the last."""

    def __init__(
        self, servers: AdapterServers, saved: SavedAdapters, most: int = ADAPTERS_IN_MEMORY
    ) -> None:
        self._servers = servers
        self._saved = saved
        self._most = most
        self._loaded: dict[str, _Loaded] = {}
        #: Those that servers are taking.
        self._coming: dict[str, _Loaded] = {}
        self._adding = asyncio.Lock()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._loaded)

    @asynccontextmanager
    async def used(self, path: str | None) -> AsyncIterator[str | None]:
        """Have an adapter on the servers meanwhile, and yield what they call it; None, the model
        itself, is always there.

        Raises:
            LibraError: nothing is saved there, or a server does not take it.
        """
        if path is None:
            yield None
            return
        loaded = await self._load(path)
        try:
            yield loaded.name
        finally:
            loaded.users -= 1
            if loaded.dropped and not loaded.users:
                await self._remove(loaded)

    async def _load(self, path: str) -> _Loaded:
        """Return the adapter of a path, with a user more."""
        while path not in self._loaded:  # it may be saved anew while servers take it
            async with self._adding:
                if path not in self._loaded:
                    await self._add(path)
        loaded = self._loaded[path] = self._loaded.pop(path)
        loaded.users += 1
        return loaded

    async def _add(self, path: str) -> None:
        idle = [one for one, loaded in self._loaded.items() if not loaded.users]
        for one in idle[: max(0, len(self._loaded) + 1 - self._most)]:
            await self._drop(one)
        loaded = self._coming[path] = _Loaded(f"{path}#{next(self._numbers)}")
        try:
            await self._servers.add_adapter(loaded.name, *self._saved.load(path))
        except LibraError:
            loaded.dropped = True  # other servers may have taken it
            raise
        finally:
            del self._coming[path]
            if loaded.dropped:
                await self._remove(loaded)
        if not loaded.dropped:
            self._loaded[path] = loaded

    async def drop(self, path: str) -> None:
        """Let go of what is loaded of a path, at once or when its last user has ended; who names
        the path from now on has it loaded again."""
        if path in self._coming:  # of what was there before, maybe
            self._coming[path].dropped = True
        await self._drop(path)

    async def _drop(self, path: str) -> None:
        loaded = self._loaded.pop(path, None)
        if loaded is not None:
            loaded.dropped = True
            if not loaded.users:
                await self._remove(loaded)

    async def _remove(self, loaded: _Loaded) -> None:
        # A server that cannot is failing, and the service with it, which says why.
        with contextlib.suppress(LibraError):
            await self._servers.remove_adapter(loaded.name)
