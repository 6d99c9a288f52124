"""The KV cache of one server, in blocks: who holds them, and what is kept for later.

A request holds blocks of its own, and shares those of a declared prefix with its siblings. What it
computed stays when it leaves, as idle blocks under its session's key; a shared prefix is idle when
the last of its users leaves. Idle blocks go when room is needed: the longest idle first, from its
end, as vLLM's free queue has it.

Guarantee: ``held + idle`` never exceeds ``total`` after ``trim``, provided ``held`` does not; a hit
is always blocks that were computed (or are, in this very step) under the same key. Limit: one key,
one chain of blocks: text that two sessions share without declaring it is kept twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeAlias

from libra_cli.core.types import Tokens

Key: TypeAlias = tuple[Hashable, Hashable]
"""A session or a shared prefix, and the weights its KV was computed with."""


class Prefix:
    """Blocks that outlive a request: ``blocks`` of them from block ``start`` of a context."""

    __slots__ = ("blocks", "key", "start", "table", "users")

    def __init__(self, table: dict[Key, Prefix], key: Key, start: int, blocks: int) -> None:
        self.table = table
        self.key = key
        self.start = start
        self.blocks = blocks
        self.users = 0


class PrefixHolder:
    """The blocks of a request, and the prefix that it shares.

    ``blocks`` counts all it holds, the ``shared`` first of which belong to ``prefix``. One of the
    users of a prefix, its ``owner``, extends it, up to ``shareable`` blocks.
    """

    __slots__ = ("blocks", "owner", "prefix", "session", "shareable", "shared", "shared_key")

    def __init__(self, session: Key | None, shared_key: Key | None, shareable: int) -> None:
        self.session = session
        self.shared_key = shared_key if shareable else None
        self.shareable = shareable
        self.blocks = self.shared = 0
        self.prefix: Prefix | None = None
        self.owner = False


class KvCache:
    """``total`` blocks of ``size`` tokens; ``held`` by requests, ``idle`` kept for later ones."""

    __slots__ = ("_idle", "_prefixes", "_sessions", "held", "idle", "size", "total")

    def __init__(self, total: int, size: Tokens) -> None:
        self.total = total
        self.size = size
        self.held = 0
        self.idle = 0
        self._idle: OrderedDict[Prefix, None] = OrderedDict()
        self._sessions: dict[Key, Prefix] = {}
        self._prefixes: dict[Key, Prefix] = {}

    def place(self, holder: PrefixHolder, target: Tokens, due: int) -> Tokens | None:
        """Let a request in that must compute ``target`` tokens, beside ``due`` blocks of others.

        Returns the tokens it finds here, which it now holds; None, and nothing changes, where the
        whole context does not fit (vLLM's ``scheduler_reserve_full_isl``). The last token of a
        context is never found: computing it yields the next.
        """
        most = (target - 1) // self.size
        own = self._sessions.get(holder.session) if holder.session is not None else None
        prefix = self._prefixes.get(holder.shared_key) if holder.shared_key is not None else None
        shared = free = 0
        if prefix is not None:
            shared = min(prefix.blocks, holder.shareable, most)
            free = shared if prefix.users else 0
        if self.held + due + -(-target // self.size) - free > self.total:
            return None
        hit = shared
        if own is not None:
            if own.start <= shared:
                hit = max(hit, min(own.start + own.blocks, most))
            # What does not continue the shared part, or is longer than the context, is dropped.
            self._drop(own)
            self.held += hit - shared
        self._attach(holder, prefix, shared)
        holder.blocks = hit
        return hit * self.size

    def grow(self, holder: PrefixHolder, computed: Tokens, due: int) -> None:
        """Hold what ``computed`` tokens need, leaving room for ``due`` blocks of others.

        Siblings may use full blocks as soon as their step is scheduled, as in vLLM.
        """
        blocks = -(-computed // self.size)
        self.held += blocks - holder.blocks
        holder.blocks = blocks
        if self.held + self.idle + due > self.total:
            self.trim(due)
        if holder.owner:
            assert holder.prefix is not None
            known = min(holder.shareable, computed // self.size)
            holder.prefix.blocks = holder.shared = max(holder.shared, known)

    def shrink(self, holder: PrefixHolder, computed: Tokens) -> None:
        """Take back blocks that are not computed after all, so that nobody hits them."""
        if holder.owner and holder.prefix is not None and holder.prefix.users == 1:
            holder.shared = min(holder.shared, computed // self.size)
            holder.prefix.blocks = holder.shared

    def release(self, holder: PrefixHolder, computed: Tokens) -> None:
        """Let go of everything; the full blocks of ``computed`` tokens stay, idle."""
        self.held -= holder.blocks - holder.shared
        kept = computed // self.size - holder.shared
        key = holder.session
        if kept > 0 and key is not None:
            self.forget(key)
            entry = self._sessions[key] = Prefix(self._sessions, key, holder.shared, kept)
            self._idle[entry] = None
            self.idle += kept
        prefix = holder.prefix
        if prefix is not None:
            prefix.users -= 1
            if not prefix.users:
                self._rest(prefix)
        holder.blocks = holder.shared = 0
        holder.prefix = None
        holder.owner = False

    def trim(self, due: int = 0) -> None:
        """Evict what has been idle longest until ``due`` more blocks fit."""
        surplus = self.held + self.idle + due - self.total
        while surplus > 0:
            entry = next(iter(self._idle))
            taken = min(surplus, entry.blocks)
            surplus -= taken
            if taken == entry.blocks:
                self._drop(entry)
            else:
                entry.blocks -= taken
                self.idle -= taken

    def forget(self, session: Key) -> None:
        """Drop the idle blocks of a session."""
        entry = self._sessions.get(session)
        if entry is not None:
            self._drop(entry)

    def flush(self) -> None:
        """Drop the idle blocks of all sessions."""
        for entry in list(self._idle):
            self._drop(entry)

    def _drop(self, entry: Prefix) -> None:
        del self._idle[entry]
        del entry.table[entry.key]
        self.idle -= entry.blocks

    def _attach(self, holder: PrefixHolder, prefix: Prefix | None, shared: int) -> None:
        """Tie a request to the prefix it shares, or let it begin one."""
        holder.shared = shared
        key = holder.shared_key
        if key is None:
            return
        if prefix is None:
            prefix = self._prefixes[key] = Prefix(self._prefixes, key, 0, 0)
        elif not prefix.users:
            del self._idle[prefix]
            self.idle -= prefix.blocks
        if not prefix.users:
            holder.owner = True
            self.held += shared
            prefix.blocks = shared
        prefix.users += 1
        holder.prefix = prefix

    def _rest(self, prefix: Prefix) -> None:
        """Make a shared prefix without users the newest of the idle ones."""
        if not prefix.blocks:
            del self._prefixes[prefix.key]
            return
        self.held -= prefix.blocks
        self.idle += prefix.blocks
        self._idle[prefix] = None
