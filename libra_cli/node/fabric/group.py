"""A gloo process group of the hosts that take one weight version, without a store of torch's.

Gloo asks its store for one thing: the addresses at which the other ranks listen. Torch's TCPStore
would answer whoever connects. Here a rank tells its own address to its agent, and the controller
brings all of them to every rank over the agents' streams, which are authenticated. Gloo itself
neither encrypts nor proves who sends.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store

STALL_S = 5.0
"""Seconds after which a rank that takes or sends nothing is given up by its neighbours."""


class Addresses(Store):  # type: ignore[misc]
    """The addresses of a group's ranks, of which gloo knows its own and the controller the rest."""

    def __init__(self, *, patience_s: float) -> None:
        """Wait for the others' addresses at most ``patience_s`` seconds, whenever gloo asks."""
        super().__init__()
        self._patience_s = patience_s
        self._own = b""
        self._all: Sequence[bytes] = ()
        self._has_own, self._has_all = threading.Event(), threading.Event()

    def own(self) -> bytes:
        """Wait for the address at which this rank listens.

        Raises:
            TimeoutError: gloo does not listen.
        """
        if not self._has_own.wait(self._patience_s):
            raise TimeoutError("gloo does not listen")
        return self._own

    def tell(self, addresses: Sequence[bytes]) -> None:
        """Give gloo the addresses of all ranks, in their order."""
        self._all = addresses
        self._has_all.set()

    # What gloo calls; the last part of a key is the number of a rank.

    def set(self, key: str, value: bytes) -> None:
        """Take this rank's address from gloo."""
        self._own = bytes(value)
        self._has_own.set()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until the addresses are known.

        Raises:
            TimeoutError: the controller has not told them.
        """
        if not self._has_all.wait(self._patience_s):
            raise TimeoutError("the addresses of the other hosts did not come")

    def get(self, key: str) -> bytes:
        """Return the address of a rank."""
        self.wait([key])
        return self._all[int(key.rpartition("/")[2])]


class HostGroup:
    """This host's rank in a process group, which a thread makes."""

    def __init__(self, interface: str, rank: int, size: int, *, patience_s: float) -> None:
        """Listen at the address of ``interface`` and nowhere else."""
        self.rank = rank
        self.size = size
        self._addresses = Addresses(patience_s=patience_s)
        self._interface = interface
        self._made: ProcessGroupGloo | None = None
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="group", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            options = ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=STALL_S)
            options._devices = [ProcessGroupGloo.create_device(interface=self._interface)]
            self._made = ProcessGroupGloo(self._addresses, self.rank, self.size, options)
        except Exception as error:  # noqa: BLE001  raised where the group is wanted
            self._problem = error
            self._addresses.set("", b"")  # whoever waits for an address hears of it now

    def address(self) -> bytes:
        """Return the address at which this rank listens.

        Raises:
            Exception: there is no such interface, or gloo does not listen there.
        """
        own = self._addresses.own()
        if self._problem is not None:
            raise self._problem
        return own

    def connect(self, addresses: Sequence[bytes]) -> ProcessGroupGloo:
        """Connect to all other ranks, and return the group.

        Raises:
            Exception: one of them cannot be reached.
        """
        self._addresses.tell(addresses)
        self._thread.join()
        if self._made is None:
            raise self._problem or RuntimeError("no group was made")
        return self._made
