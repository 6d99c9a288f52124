"""What Triton needs on a host before it can compile anything, and the kernel that it compiles. The
launch itself needs a GPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

triton_kernel = pytest.importorskip("libra_cli.node.checks.triton_kernel")


@pytest.fixture(autouse=True)
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with Python's headers, and a compiler on PATH."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_kernel.sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").symlink_to(shutil.which("true") or "/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_nothing_is_missing_where_compiler_and_headers_are():
    assert triton_kernel.missing_tool() == ""


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert triton_kernel.missing_tool() == "there is no C compiler (neither gcc nor clang)"
    monkeypatch.setenv("CC", "zig cc")
    assert triton_kernel.missing_tool() == "there is no C compiler (CC=zig cc)"


def test_missing_headers_are_named(headers: Path):
    (headers / "Python.h").unlink()
    assert triton_kernel.missing_tool() == f"there are no headers of Python ({headers}/Python.h)"


def test_without_a_gpu_a_launch_fails_instead_of_passing():
    with pytest.raises((AssertionError, RuntimeError)):
        triton_kernel.problem()


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_kernel_compiles_for_gpus(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Triton refused it on a GPU for the annotations of its parameters; no GPU is needed to see."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    source = compiler.ASTSource(
        fn=triton_kernel._twice,
        signature={"source": "*fp32", "target": "*fp32", "size": "constexpr"},
        constexprs={(2,): triton_kernel.SIZE},
    )
    assert compiler.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
