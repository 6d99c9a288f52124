"""Finds out what hosts have before there is a recipe: GPUs, memory, Python, the model.

Nothing of libra has to be there, and nothing is left there: a host needs ``sh`` alone.
"""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import NodeSpec
from libra_cli.runtime.doctor.remote_files import expanded, shell
from libra_cli.runtime.hosts.cluster import transport_to
from libra_cli.runtime.hosts.remote_files import fetch_tokenizer
from libra_cli.runtime.hosts.transport import Transport

PACKAGES = ("accelerate", "torch", "transformers", "vllm")
"""What a run imports on every host, as ``import`` knows it."""
_PYTHON = (
    "import importlib.util as u, sys; "
    "print('python', '%d.%d.%d' % sys.version_info[:3], "
    "*(name for name in sys.argv[1:] if u.find_spec(name)))"
)
_SCRIPT = r"""
echo "cpus $(nproc)"
sed -n 's/^MemTotal: *\([0-9]*\) kB/memory \1/p' /proc/meminfo
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null)
case "$limit" in ''|*[!0-9]*) ;; *) echo "memory $((limit / 1024))";; esac
if test -n "$2" && test -e "$2/config.json"; then echo "model $2"; fi
python=$1 code=$3; shift 3
"$python" -c "$code" "$@" 2>/dev/null
columns=memory.total,memory.used,name
if command -v nvidia-smi >/dev/null 2>&1; then
  nvidia-smi --query-gpu=$columns --format=csv,noheader,nounits | sed 's/^/gpu /'
fi
exit 0
"""
_MIB_GIB = 1024.0
IN_USE_GIB = 1.0
"""A GPU with so much of its memory taken is somebody's; a driver alone takes less."""


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """A GPU, as nvidia-smi describes it."""

    name: str
    gib: float
    """Its memory in GiB; 0 where nvidia-smi does not tell."""
    used_gib: float


@dataclass(frozen=True, slots=True)
class FoundHost:
    """What a host told; with ``error`` there is nothing else."""

    node: NodeSpec
    cpus: int = 0
    memory_gib: float = 0.0
    """Memory of the host, or of its container if that has less."""
    gpus: tuple[FoundGpu, ...] = ()
    python: str = ""
    """The version of the interpreter that a run would use; empty if there is none."""
    packages: tuple[str, ...] = ()
    """Names in ``PACKAGES`` that are installed there."""
    model: str = ""
    """The model's directory there; empty if it is not there."""
    error: str = ""
    hint: str = ""

    @property
    def is_prepared(self) -> bool:
        """Whether it has all that a run imports there."""
        return set(PACKAGES) <= set(self.packages)

    @property
    def gpus_in_use(self) -> int:
        """Number of GPUs with more than ``IN_USE_GIB`` of memory in use."""
        return sum(gpu.used_gib > IN_USE_GIB for gpu in self.gpus)


async def discover(
    nodes: Sequence[NodeSpec], model: str | None, copy: Path
) -> tuple[FoundHost, ...]:
    """Ask all hosts at the same time, each in its own report.

    The tokenizer and the configuration of the model are copied into ``copy`` from the first host
    that has the model, if one has it.
    """
    transports = {node.name: transport_to(node) for node in nodes}
    try:
        found = await asyncio.gather(
            *(_look(node, transports[node.name], model or "") for node in nodes)
        )
        if having := next((one for one in found if one.model), None):
            await fetch_tokenizer(transports[having.node.name], having.model, copy)
    finally:
        await asyncio.gather(*(transport.close() for transport in transports.values()))
    return tuple(found)


async def _look(node: NodeSpec, transport: Transport, model: str) -> FoundHost:
    try:
        await transport.connect()
        words = [expanded(transport, one) for one in (transport.default_python, model)]
        done = await shell(transport, _SCRIPT, *words, _PYTHON, *PACKAGES)
    except LibraError as error:
        return FoundHost(node, error=str(error).removeprefix(f"{node.name}: "), hint=error.hint)
    return read_report(node, done.stdout.decode(errors="replace"))


def read_report(node: NodeSpec, text: str) -> FoundHost:
    """Read what the script has printed: a word and its values in each line."""
    lines = [line.partition(" ")[::2] for line in text.splitlines()]
    memory = [int(value) for word, value in lines if word == "memory"]
    told = dict(lines)
    python, *packages = told.get("python", "").split() or [""]
    return FoundHost(
        node,
        cpus=int(told.get("cpus") or 0),
        memory_gib=min(memory, default=0) / 1024**2,
        gpus=tuple(_gpus(value for word, value in lines if word == "gpu")),
        python=python,
        packages=tuple(packages),
        model=told.get("model", ""),
    )


def _gpus(rows: Iterator[str]) -> Iterator[FoundGpu]:
    for row in csv.reader(rows, skipinitialspace=True):
        if len(row) == 3:  # without a driver, nvidia-smi prints a sentence
            total, used, name = row
            yield FoundGpu(name.strip(), _gib(total), _gib(used))


def _gib(cell: str) -> float:
    return int(cell) / _MIB_GIB if cell.isdigit() else 0.0
