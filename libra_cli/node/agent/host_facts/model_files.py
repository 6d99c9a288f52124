"""Fingerprints of a model directory, quick enough for the start of every run.

Of files that are small the whole content counts; of a large one its size, its beginning (where a
safetensors file keeps the names, shapes and places of its tensors) and samples from its middle and
its end. Two files that differ elsewhere only have the same fingerprint; ``libra setup`` compares
whole files. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from libra_cli.node.agent_errors import AgentRefused

WHOLE = 32 * 1024**2
"""Bytes up to which a file counts as small: a tokenizer is, a shard is not."""
SAMPLE = 1024**2


def fingerprints(directory: str) -> dict[str, object]:
    """Return ``files``, the size in bytes and a SHA-256 of each by name, and ``config``, what
    ``config.json`` says.

    Raises:
        AgentRefused: there is no such directory, or a file of it cannot be read.
    """
    root = Path(directory).expanduser()
    try:
        files = sorted(one for one in root.iterdir() if one.is_file())
        found = {
            one.name: [one.stat().st_size, _digest(one)]
            for one in files
            if not one.name.startswith(".") and one.suffix != ".part"
        }
        return {"files": found, "config": _config(root / "config.json")}
    except OSError as error:
        raise AgentRefused("request", f"{directory}: {error.strerror}: {error.filename}") from error


def _digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
        else:
            for place in (0, size // 2, size - SAMPLE):
                file.seek(place)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, FileNotFoundError):
        return {}
    return config if isinstance(config, dict) else {}
