"""A task that was made, and how it is written as a directory of Harbor's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IMAGE = "python:3.12-bookworm"
"""The image after FROM: it has Python, git, tar and zip's formats, and no task needs more."""
_TASK_FILE = """\
version = "1.0"

[metadata]
author_name = "libra"
difficulty = "{difficulty}"
category = "{category}"
tags = {tags}

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0

[environment]
build_timeout_sec = 120.0
cpus = 1
memory_mb = 1024
storage_mb = 1024
allow_internet = false
"""
_TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
if python3 /tests/check.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""
_CHECK = """\
import json
from pathlib import Path

APP = Path("/app")
EXPECTED = json.loads(Path("/tests/expected.json").read_text())

"""


@dataclass(frozen=True, slots=True)
class MadeTask:
    """What one task says, holds, expects, and how it is solved."""

    instruction: str
    files: Mapping[str, str | bytes]
    """What ``/app`` begins with, by path."""
    solve: str
    """Lines of bash that solve it, run in ``/app``."""
    check: str
    """Lines of Python that fail unless it is solved; ``APP`` and ``EXPECTED`` are there."""
    expected: Any = None
    """What is expected, as JSON; the model never sees it."""
    category: str = "files"
    difficulty: str = "easy"
    build: str = ""
    """Lines of bash that the image is made with, run in ``/app``."""
    hidden: Mapping[str, str] = field(default_factory=dict)
    """More files of the tests, by path."""


def write_task(directory: Path, task: MadeTask) -> None:
    """Write a task as a new directory.

    Raises:
        OSError: it is there already, or cannot be written.
    """
    directory.mkdir(parents=True)
    settings = {"difficulty": task.difficulty, "category": task.category}
    tags = json.dumps([directory.name.rpartition("-")[0]])
    _write(directory / "task.toml", _TASK_FILE.format(**settings, tags=tags))
    _write(directory / "instruction.md", task.instruction.strip() + "\n")
    for name, content in task.files.items():
        _write(directory / "environment" / "files" / name, content)
    dockerfile = f"FROM {IMAGE}\nWORKDIR /app\n"
    if task.files:
        dockerfile += "COPY files/ /app/\n"
    if task.build:
        dockerfile += f"RUN <<'BUILD'\nset -e\n{task.build.strip()}\nBUILD\n"
    _write(directory / "environment" / "Dockerfile", dockerfile)
    _write(directory / "solution" / "solve.sh", f"#!/bin/bash\nset -e\n{task.solve.strip()}\n")
    _write(directory / "tests" / "test.sh", _TEST)
    _write(directory / "tests" / "check.py", _CHECK + task.check.strip() + "\n")
    _write(directory / "tests" / "expected.json", json.dumps(task.expected) + "\n")
    for name, text in task.hidden.items():
        _write(directory / "tests" / name, text)


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if path.suffix == ".sh":
        path.chmod(0o755)
