"""What a host needs before its agent can run: a Python new enough, and this very package."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import libra_cli
from libra_cli.config.errors import HostError
from libra_cli.runtime.hosts.transport import Completed, Transport

CHECK_S = 30.0
OLDEST_PYTHON = (3, 11)
QUESTION = "import json, sys; print(json.dumps(sys.version_info[:2]))"


@cache
def package() -> tuple[dict[str, bytes], str]:
    """This package's files as they go to a host, and a name for exactly this content."""
    root = Path(libra_cli.__file__).parent
    paths = sorted(root.rglob("*.py"))
    files = {f"libra_cli/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return files, digest.hexdigest()[:16]


async def check_python(transport: Transport, name: str, python: str, workdir: str) -> None:
    """Raise ``HostError`` unless this interpreter of the host runs node code."""
    hint = (
        f"on the host: python3 -m venv {workdir}/venv"
        f" && {workdir}/venv/bin/pip install 'libra-rl[gpu]'"
    )
    done = await transport.run([python, "-c", QUESTION], timeout_s=CHECK_S)
    if done.exit_code:
        raise HostError(f"{name}: {python} is no Python that runs: {done.story}", hint=hint)
    version = tuple(last_line(name, done))
    if version < OLDEST_PYTHON:
        reason = f"{name}: {python} is Python %d.%d; libra needs %d.%d"
        raise HostError(reason % (*version, *OLDEST_PYTHON), hint=hint)


def last_line(name: str, done: Completed) -> Any:
    """The JSON a command of ours printed; before it a login script may have had its say."""
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise HostError(f"{name}: {done.story}") from error
