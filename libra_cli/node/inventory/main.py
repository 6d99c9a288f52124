"""Answers what runs own on this host, and removes what is old. Standard library only.

python -m libra_cli.node.inventory.main ps WORK                        # JSON, see ``owned``
python -m libra_cli.node.inventory.main gc WORK DAYS RUN FLAGS...      # --dry-run, --all
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from libra_cli.node.inventory.collection import old_things, remove
from libra_cli.node.inventory.owned import owned


def main(arguments: Sequence[str]) -> int:
    """Print one line of JSON, and return the exit code."""
    command, work, *rest = arguments
    if command == "ps":
        sys.stdout.write(json.dumps(owned(Path(work, "runs"))) + "\n")
        return 0
    days, run, *flags = rest
    found = old_things(Path(work), days=float(days), run=run, everything="--all" in flags)
    gone = found if "--dry-run" in flags else remove(found)
    sys.stdout.write(json.dumps([asdict(one) for one in gone]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
