"""A package ``torchvision`` with names alone, where there is none and a model's class needs it.

vLLM's classes of models that also see import transformers' processors of images, and these import
torchvision, whose wheels in the usual index are built for CUDA and fail beside a torch for CPUs.
Text needs nothing of it, and images become patches by PIL (``node.model.images``): its names can be
imported, and whoever calls one is told so.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

VERSION = "0.28.0"
_NOTHING = """
class _Nothing:
    def __init__(self, *given, **named):
        raise RuntimeError("this torchvision has names alone")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing
"""
_MODES = """
import enum

names = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
InterpolationMode = enum.Enum(
    "InterpolationMode", {name.upper().replace("-", "_"): name for name in names}
)
"""
_AGAIN = "from torchvision.transforms import InterpolationMode\n"
_PARTS = "from torchvision.transforms{} import functional\n"
"""Before ``__getattr__``, which would answer for modules."""
FILES = {
    "torchvision/__init__.py": f"__version__ = {VERSION!r}\n",
    "torchvision/io.py": _NOTHING,
    "torchvision/ops.py": _NOTHING,
    "torchvision/transforms/__init__.py": _MODES + _PARTS.format("") + _NOTHING,
    "torchvision/transforms/functional.py": _AGAIN + _NOTHING,
    "torchvision/transforms/v2/__init__.py": _AGAIN + _PARTS.format(".v2") + _NOTHING,
    "torchvision/transforms/v2/functional.py": _AGAIN + _NOTHING,
    f"torchvision-{VERSION}.dist-info/METADATA": f"Name: torchvision\nVersion: {VERSION}\n",
}


def provide(model_dir: Path) -> None:
    """Write the package, for this process and those that it starts, if this model's class needs it
    and there is none. Call it before anything of transformers is imported."""
    config = json.loads((model_dir / "config.json").read_bytes())
    if "text_config" in config and importlib.util.find_spec("torchvision") is None:
        sys.path.append(written())
        os.environ["PYTHONPATH"] = after(os.environ.get("PYTHONPATH", ""), sys.path[-1])


def after(paths: str, place: str) -> str:
    """Return a PYTHONPATH with a place behind the others."""
    return os.pathsep.join([*filter(None, [paths]), place])


def written() -> str:
    """Write the package to a directory that ends with this process, and return that."""
    place = Path(tempfile.mkdtemp(prefix="libra-torchvision-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    for name, text in FILES.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(place)
