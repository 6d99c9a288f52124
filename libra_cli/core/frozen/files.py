"""What the directory of a frozen model holds on a host, and whether two hosts hold the same.

A model of one name is one model, whichever of its servers answers, so their files are compared byte
by byte: each host tells the SHA-256 of each of its files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TypeAlias

from libra_cli.core.frozen.slots import FrozenSlot
from libra_cli.core.launch.process import VISIBLE, HostFacts, ProcessSpec, common_env

Files: TypeAlias = Mapping[str, tuple[int, str]]
"""The size in bytes and the SHA-256 of each file, by its name."""


def files_process(frozen: FrozenSlot, facts: HostFacts, *, path: str) -> ProcessSpec:
    """Return the process that reads the model's directory ``path`` on its host, and prints what
    ``node.checks.model_files`` says."""
    known = f"{facts.run_dir}/files-of-{frozen.model.name}.json"
    env = {**common_env(frozen.node, [frozen.slot], facts), VISIBLE: ""}
    return ProcessSpec(
        node=frozen.node.name,
        process=f"files-{frozen.process}",
        argv=(facts.python, "-m", "libra_cli.node.checks.model_files", path, known),
        env=env | frozen.node.env,
    )


def digest_of(files: Files) -> str:
    """The SHA-256 of a directory: of what ``sha256sum`` prints of its files, in order of names."""
    lines = (f"{files[name][1]}  {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def difference(files: Files, reference: Files) -> str:
    """Say which file of a directory is not as in another, and how; empty if all are alike."""
    for name in sorted({*files, *reference}):
        there, wanted = files.get(name), reference.get(name)
        if there is None:
            return f"{name} is not there"
        if wanted is None:
            return f"{name} is only there"
        if there[0] != wanted[0]:
            return f"{name} has {there[0]} bytes, not {wanted[0]}"
        if there[1] != wanted[1]:
            return f"{name} has other bytes"
    return ""
