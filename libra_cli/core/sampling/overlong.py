"""Overlong trajectories: those that a limit cut, and those that come near it.

A trajectory is *truncated* if its last turn was cut by a limit of tokens, or if it ended because it
had no turns or tokens left. What its reward says is then of the limit as much as of the policy, so
it may be left out of the loss (DAPO's overlong filtering, TRL's ``mask_truncated_completions``); or
length is made dearer little by little (DAPO's soft overlong punishment, arXiv 2503.14476, eq. 13).
"""

from __future__ import annotations

from libra_cli.core.types import Tokens


def overlong_penalty(context: Tokens, *, most: Tokens, buffer: Tokens, penalty: float) -> float:
    """Return what a trajectory of ``context`` tokens loses of its reward: 0 up to ``most - buffer``
    tokens, ``penalty`` at ``most``, and in proportion between them.
    """
    if not buffer:
        return 0.0
    return penalty * min(1.0, max(0, context - (most - buffer)) / buffer)
