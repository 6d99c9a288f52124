"""The small model that comes with libra: ``python -m tests.shipped_model`` makes it anew.

It is what ``model.build`` makes of the usual request, on one thread, in 80 seconds of a core. The
same code on the same kind of processor makes the same bits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from libra_cli.config.recipe import ModelBuild

SHIPPED = Path(__file__).parents[1] / "libra_cli/models/pointer-chase"
MAKE = "python -m tests.shipped_model"


def made_in(place: Path) -> Path:
    """Make the model in a directory, as a host does, and return the model's own."""
    spec, answer = place / "spec.json", place / "answer.json"
    build = ModelBuild().model_dump(mode="json", exclude_none=True)
    spec.write_text(json.dumps({"path": None, "build": build, "cache": str(place / "models")}))
    subprocess.run(
        [sys.executable, "-m", "libra_cli.node.model.build", spec, answer],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    return Path(json.loads(answer.read_text())["model_dir"])


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        made = made_in(Path(place))
        shutil.rmtree(SHIPPED, ignore_errors=True)
        SHIPPED.mkdir(parents=True)
        for file in made.iterdir():  # their modes stay behind: the weights' lets nobody else read
            (SHIPPED / file.name).write_bytes(file.read_bytes())
    print(f"wrote {SHIPPED}")  # noqa: T201


if __name__ == "__main__":
    main()
