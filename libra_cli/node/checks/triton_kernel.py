"""Launches one kernel of Triton, which vLLM's sampler and compiled layers are made of.

Triton compiles a C file at its first kernel on a host, so that needs a compiler and Python's
headers; without them a server ends a minute after its start.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch
import triton
import triton.language as tl

SIZE = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _twice(source, target, size: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  Triton reads annotations
    places = tl.arange(0, size)
    tl.store(target + places, 2 * tl.load(source + places))


def problem() -> str:
    """Compile and launch a kernel on the first GPU; return what is missing or wrong, or nothing."""
    if missing := missing_tool():
        return missing
    numbers = torch.arange(SIZE, dtype=torch.float32, device="cuda")
    doubled = torch.empty_like(numbers)
    _twice[(1,)](numbers, doubled, SIZE)
    return "" if bool((doubled == 2 * numbers).all()) else "a kernel computed wrong numbers"


def missing_tool() -> str:
    """Return which of compiler and headers is missing; empty if both are there.

    Triton takes the compiler that CC names, or gcc or clang.
    """
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named.split()[0]] if named else ["gcc", "clang"])):
        return f"there is no C compiler ({f'CC={named}' if named else 'neither gcc nor clang'})"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return "" if headers.is_file() else f"there are no headers of Python ({headers})"
