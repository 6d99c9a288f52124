"""``libra``, for which deaths of an hour are those of ten hours.

A campaign breaks as much in an hour as befalls a run in weeks. What is counted over time, so that
a process which dies again and again is given up, is therefore counted over a tenth of it; nothing
else is changed, and no deadline.
"""

from __future__ import annotations

from libra_cli.cli.main import main
from libra_cli.core.cluster import replica_set, restarts, trainer_life

HASTE = 10.0

if __name__ == "__main__":
    restarts.WINDOW_S /= HASTE
    restarts.FIRST_WAIT_S /= HASTE
    restarts.MOST_WAIT_S /= HASTE
    replica_set.LATER_S /= HASTE  # type: ignore[attr-defined]
    trainer_life.RESTART_EVERY_S /= HASTE
    main()
