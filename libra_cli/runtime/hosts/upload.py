"""Prepares a host for its agent: checks its Python, and packs this package for the upload."""

from __future__ import annotations

import hashlib
import json
import secrets
from functools import cache
from pathlib import Path
from typing import Any

import libra_cli
from libra_cli.config.errors import HostError
from libra_cli.runtime.hosts.transport import CommandResult, Transport
from libra_cli.runtime.supervision.answers import understood

CHECK_S = 30.0
OLDEST_PYTHON = (3, 11)
QUESTION = """
import hashlib, json, os, pathlib, sys
root, digest = pathlib.Path(sys.argv[1], "libra_cli"), hashlib.sha256()
for path in sorted(root.rglob("*.py")):
    name, data = "libra_cli/" + path.relative_to(root).as_posix(), path.read_bytes()
    digest.update(f"{name}\\0{len(data)}\\0".encode() + data)
there = os.path.isdir(sys.argv[1])
if there:
    os.utime(sys.argv[1])
print(json.dumps([*sys.version_info[:2], digest.hexdigest()[:16] if there else ""]))
"""
"""Asks for the version, and for the digest of the code that is there, as ``package`` makes it. What
is used has a new time, which ``libra gc`` looks at."""


@cache
def package() -> tuple[dict[str, bytes], str]:
    """Return this package's Python files by name, and 16 hexadecimal digits of their SHA-256."""
    root = Path(libra_cli.__file__).parent
    paths = sorted(root.rglob("*.py"))
    files = {f"libra_cli/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return files, digest.hexdigest()[:16]


async def check_python(transport: Transport, name: str, python: str, code: str) -> str:
    """Check that an interpreter of the host can run node code.

    Returns:
        The digest of the code in a directory there; empty if there is none.

    Raises:
        HostError: it does not run, or is older than ``OLDEST_PYTHON``.
    """
    hint = "libra setup RECIPE makes one with all that is needed"
    done = await transport.run([python, "-c", QUESTION, code], timeout_s=CHECK_S)
    if done.exit_code:
        raise HostError(f"{name}: {python} is no Python that runs: {done.last_words}", hint=hint)
    with understood(HostError, f"{name}: the version of {python}"):
        major, minor, *rest = last_line(name, done)
        version = (int(major), int(minor))
    if version < OLDEST_PYTHON:
        reason = f"{name}: {python} is Python %d.%d; libra needs %d.%d"
        raise HostError(reason % (*version, *OLDEST_PYTHON), hint=hint)
    return str(rest[0]) if rest else ""


async def put_code(transport: Transport, name: str, python: str, directory: str) -> None:
    """Check the interpreter, and put this package into a directory named by its digest.

    Code that is there and is not what its name says (a disk was full, a host lost its power while
    it was written) is put aside, and written anew.

    Raises:
        HostError: the interpreter is of no use, or the code cannot be written.
    """
    code, digest = package()
    found = await check_python(transport, name, python, directory)
    if found not in ("", digest):
        aside = f"{directory}.damaged-{secrets.token_hex(4)}"
        await transport.run(["mv", "-T", directory, aside], timeout_s=CHECK_S)
    await transport.put_tree(code, directory)


def last_line(name: str, done: CommandResult) -> Any:
    """Parse the JSON that a command of ours printed last, after a login script's output.

    Raises:
        HostError: the last line is no JSON.
    """
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, RecursionError, ValueError) as error:
        raise HostError(f"{name}: {done.last_words}") from error
