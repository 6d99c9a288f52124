"""GPUs that only nvidia-smi and the doctor's torch see, and processes that take them for theirs.

torch is this machine's with the version of a build for CUDA 13.0. To a check of a host it shows the
GPUs that ``FAKE_GPUS`` lists; Triton's own interpreter then runs the doctor's kernel.
"""

from __future__ import annotations

import importlib.util
import venv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.accelerate import Accelerate
from libra_cli.core.launch.process import VISIBLE, ProcessSpec, common_env
from libra_cli.core.launch.rollout_backend import ServerLaunch
from libra_cli.core.launch.trainer_backend import TrainerLaunch
from tests.load.backend import AtOnce

SEES: Mapping[str, str] = {"TRITON_INTERPRET": "1"}
"""What a check needs beside ``FAKE_GPUS``."""
CUDA_13 = """
__version__ = '2.13.0+cu130'
cuda: str | None = '13.0'
debug, git_version = False, ''
hip = xpu = rocm = None
"""
FAKE_GPUS = """
import os
if os.environ.get("FAKE_GPUS") and os.environ.get("LIBRA_PROCESS", "").startswith("check-"):
    def _on_cpu(create):
        return lambda *args, device=None, **options: create(*args, **options)
    ones, arange = _on_cpu(ones), _on_cpu(arange)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: len(os.environ["FAKE_GPUS"].split())
    cuda.get_device_name, cuda.nccl.version = lambda index: "H100", lambda: (2, 29, 7)
"""
SERVER = str(Path(__file__).with_name("losing_server.py"))


def python_for_cuda(directory: Path) -> Path:
    """An environment of Python with this one's packages, its torch as a build for CUDA."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    real, ours = Path(spec.origin).parent, directory / "packages/torch"
    ours.mkdir(parents=True)
    for entry in real.iterdir():
        if entry.name not in {"version.py", "__init__.py", "__pycache__"}:
            (ours / entry.name).symlink_to(entry)
    (ours / "version.py").write_text(CUDA_13)
    (ours / "__init__.py").write_text((real / "__init__.py").read_text() + FAKE_GPUS)
    venv.create(directory / "venv", with_pip=False)
    [site] = directory.glob("venv/lib/python*/site-packages")
    rest = f"import site; site.addsitedir('{real.parent}')"
    (site / "packages.pth").write_text(f"{ours.parent}\n{rest}\n")
    return directory / "venv/bin/python"


class FakeGpus:
    """The directory of an nvidia-smi that lists GPUs until they are lost."""

    def __init__(self, directory: Path, listing: str, gpus: list[str]) -> None:
        """``listing`` is all that is printed, with ``{}`` for the elements of the ``gpus``."""
        directory.mkdir()
        self.directory = directory
        head, tail = listing.split("{}")
        (directory / "head").write_text(head)
        (directory / "tail").write_text(tail)
        for number, gpu in enumerate(gpus):
            (directory / f"gpu-{number}").write_text(gpu)
        place = directory / "nvidia-smi"
        place.write_text(
            f"#!/bin/sh\ncd {directory}\ncat head\n"
            f"for n in $(seq 0 {len(gpus) - 1}); do test -e lost-$n || cat gpu-$n; done\ncat tail\n"
        )
        place.chmod(0o755)

    def lose(self, number: int) -> None:
        """From now on it lists the others, with the numbers that are left."""
        (self.directory / f"lost-{number}").touch()


class LosingServers(AtOnce):
    """As servers that compute nothing, but each ends with its GPU."""

    def server(self, recipe: Recipe, launch: ServerLaunch) -> ProcessSpec:
        """One server, which needs no model."""
        spec = super().server(recipe, launch)
        argv = tuple(SERVER if word.endswith("load/server.py") else word for word in spec.argv)
        return replace(spec, argv=argv)


class OnCpu(Accelerate):
    """A trainer that computes on the CPU, and is given GPUs by name."""

    def trainer(self, recipe: Recipe, launch: TrainerLaunch) -> tuple[ProcessSpec, ...]:
        """One launcher a node, as of hosts without GPUs."""
        on_cpu = replace(launch, train=tuple(replace(slot, gpus=()) for slot in launch.train))
        return tuple(
            replace(spec, env={**spec.env, VISIBLE: self._gpus(recipe, launch, spec.node)})
            for spec in super().trainer(recipe, on_cpu)
        )

    @staticmethod
    def _gpus(recipe: Recipe, launch: TrainerLaunch, node: str) -> str:
        slots = [slot for slot in launch.train if slot.node == node]
        return common_env(recipe.node(node), slots, launch.facts[node])[VISIBLE]
