"""Where a run was made: processor, memory, GPUs, versions, and how busy the machine was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from libra_cli import __version__
from tests.gallery.entries import CHECKOUT
from tests.gallery.facts import Machine
from tests.gpu.machine import PACKAGES, about

WHAT_RUNS = ("libra_cli", "recipes", "templates", ":!libra_cli/help")
"""The paths that decide what a run does, as git names them."""


def machine() -> Machine:
    """This machine as it is now."""
    known: dict[str, Any] = about()
    versions = {"python": known["python"]}
    versions |= {name: known[name] for name in PACKAGES if name in known}
    # What an editable install says of itself is from when it was installed.
    versions["libra-rl"] = __version__
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=known["memory_gib"],
        gpus=known["gpus"],
        load=round(os.getloadavg()[0], 1),
        versions=versions,
        commit=commit(),
    )


def commit() -> str:
    """The newest commit that changed what runs, with ``+`` if it was changed since."""
    known = _git("log", "-1", "--format=%h", "--", *WHAT_RUNS).strip()
    return known + ("+" if _git("status", "--porcelain", "--", *WHAT_RUNS).strip() else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}\nnext: use a clone of git")
    return done.stdout


def _cpu() -> str:
    """The processor's name, and which instructions for matrices it has."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    name = re.sub(r"\((R|TM)\)", "", found[1]).strip() if found else "unknown processor"
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if re.search(rf"\b{flag}\b", text)]
    return f"{name} ({', '.join(flags)})" if flags else name
