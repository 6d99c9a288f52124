"""The core, with patience for workers on a machine that is busy with other tests.

The least time that a core waits for a share after its own part is a second. What a test says of
shares must not depend on what else this machine does in that second.
"""

from __future__ import annotations

import sys

from libra_cli.node.trainer import trainer
from libra_cli.node.trainer.main import main

PATIENCE_S = 6.0

if __name__ == "__main__":
    trainer.MIN_PATIENCE_S = PATIENCE_S
    sys.exit(main())
