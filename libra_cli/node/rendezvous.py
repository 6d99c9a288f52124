"""Where ranks meet: torch's store, which listens at the address they meet at and at no other.

    python -m libra_cli.node.rendezvous MODULE ARGUMENTS

runs a launcher of torch's (``accelerate.commands.launch``, ``torch.distributed.run``) whose store
does so. By itself it listens on every interface of the host, and proves nobody who comes.
"""

from __future__ import annotations

import runpy
import sys
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from libra_cli.node.http import bind_port, own_address

QUEUE = 2048
"""Connections that wait to be taken; torch has as many."""


def store_at(
    host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **options: bool
) -> TCPStore:
    """The store of a world; the master's is served at this address, the others' are its clients.

    Raises:
        OSError: the address is none of this host, or the port is taken.
    """
    if not is_master:
        return TCPStore(host, port, world_size, is_master, timeout, **options)
    listener = bind_port((own_address(host), port), is_reserved=True)
    listener.listen(QUEUE)
    return TCPStore(
        host,
        port,
        world_size,
        is_master,
        timeout,
        master_listen_fd=listener.detach(),  # the store closes it
        **options,
    )


def main() -> None:
    """Run the launcher that the command line names, with ``store_at`` in place of torch's store."""
    static_tcp_rendezvous.TCPStore = store_at
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
