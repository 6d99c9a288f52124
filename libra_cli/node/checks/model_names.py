"""Builds a model without numbers and maps the names of its files to it and back; prints JSON.

    python -m libra_cli.node.checks.model_names DIRECTORY

It is what the trainer does first, with the headers of the files alone: of Qwen3-30B-A3B (18,867
tensors) it takes 6 s and 0.5 GiB, nearly all of it for importing transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from libra_cli.config.errors import LibraError


def report(directory: Path) -> dict[str, Any]:
    """What the model is called and how many tensors its files have, or why they do not fit."""
    from libra_cli.node.model.weight_names import names_of

    try:
        names = names_of(directory)
    except LibraError as error:
        return {"error": str(error), "hint": error.hint}
    except Exception as error:  # noqa: BLE001 - whatever a foreign model raises is the answer
        told = str(error).strip().splitlines()[:1]
        return {"error": f"transformers fails with {type(error).__name__}: {' '.join(told)[:300]}"}
    return {
        "model": type(names.model).__name__,
        "tensors": sum(len(group.disk) for group in names.groups),
        "unused": len(names.unused),
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(report(Path(sys.argv[1]).expanduser())) + "\n")
