"""The server of a frozen model: what ``vllm serve`` starts, on a Unix socket of this user alone.

    python -m libra_cli.node.frozen_model --uds PATH --model DIRECTORY <flags of vllm serve>

The command itself asks for the version of a package called vllm, which on CPUs has another name.
"""

from __future__ import annotations

import os
import sys

from libra_cli.node.unix_socket import bind_unix


def main() -> None:
    """Make the socket's directory, and serve."""
    path = sys.argv[sys.argv.index("--uds") + 1]
    bind_unix(path).close()  # what may be there is the directory, not a socket
    os.unlink(path)
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
