"""Imports torch in the very Python that a run will use, and prints what it finds as JSON.

    python -m libra_cli.node.checks.torch_report PACKAGE...

Each PACKAGE is imported as well: one that is installed may still not load, such as transformers
beside a torchvision that was built for another torch.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def report(packages: list[str]) -> dict[str, Any]:
    """What torch says of itself, and the error of every package that cannot be imported."""
    found: dict[str, Any] = {"version": "", "cuda": "", "available": False, "devices": []}
    found |= {"error": "", "nccl": "", "errors": {}, "triton": ""}
    try:
        import torch

        found["version"], found["cuda"] = torch.__version__, torch.version.cuda or ""
        found["available"] = torch.cuda.is_available()
        if found["available"]:
            found["devices"] = [
                torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
            ]
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            torch.ones(8, device="cuda").sum().item()  # a kernel of this build runs on this GPU
            found["triton"] = _triton_problem()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        found["error"] = _told(error)
    for package in packages:
        try:
            _load(package)
        except Exception as error:  # noqa: BLE001 - as above
            found["errors"][package] = _told(error)
    return found


def _triton_problem() -> str:
    """Return why a kernel of Triton cannot be compiled and launched; empty if it can."""
    try:
        from libra_cli.node.checks import triton_kernel

        return triton_kernel.problem()
    except Exception as error:  # noqa: BLE001 - as above
        return _told(error)


def _load(package: str) -> None:
    module = importlib.import_module(package)
    if package == "transformers":
        _ = module.AutoModelForCausalLM  # it loads lazily: only a model's class imports the rest


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(report(sys.argv[1:])) + "\n")
