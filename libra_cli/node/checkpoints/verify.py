"""Reads a host's part of a checkpoint through and says whether it is as it was written.

    python -m libra_cli.node.checkpoints.verify DIRECTORY

The only line of standard output is one JSON object: ``about``, what ``checkpoint.json`` says, null
where it is damaged; ``here``, the files that are there; ``damaged``, what is wrong, in words; and
``ledger``, what the controller gave with the checkpoint. Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from libra_cli.config.errors import NONSENSE, TrainerError
from libra_cli.node.checkpoints.contents import COMPLETE, about_of, damaged, here_of

LEDGER = "ledger.json"


def verified(directory: Path) -> dict[str, Any]:
    """Return what this module prints about one directory of a checkpoint."""
    name = COMPLETE
    try:
        about = about_of((directory / name).read_bytes(), name)
        name = LEDGER
        ledger = json.loads((directory / name).read_bytes())
    except TrainerError as error:
        return _unreadable(str(error))
    except (OSError, *NONSENSE) as error:
        return _unreadable(f"{name} cannot be read: {type(error).__name__}: {error}")
    return {
        "about": about,
        "here": here_of(directory, about),
        "damaged": damaged(directory, about),
        "ledger": ledger,
    }


def _unreadable(problem: str) -> dict[str, Any]:
    return {"about": None, "here": [], "damaged": [problem], "ledger": None}


def main() -> int:
    """Print what ``verified`` finds in a directory, as JSON."""
    sys.stdout.write(json.dumps(verified(Path(sys.argv[1]))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
