"""The estimators that ``training.advantage`` can name.

``core.advantages.protocol`` says what one is. To ship another is a function in ``core/advantages``
and a line here.
"""

from __future__ import annotations

from libra_cli.config.plugins import PluginGroup

_HERE = "libra_cli.core.advantages"

GAE = "gae"
"""The one that the trainer estimates, which has the critic."""
ADVANTAGES = PluginGroup(
    "libra.advantages",
    "advantage estimator",
    {
        "grpo": f"{_HERE}.group_baselines:grpo",
        "rloo": f"{_HERE}.group_baselines:rloo",
        "reinforce++": f"{_HERE}.batch_baselines:reinforce_plus_plus",
        "reinforce++-baseline": f"{_HERE}.batch_baselines:reinforce_plus_plus_baseline",
        "turn": f"{_HERE}.turn_baselines:turn",
        "gigpo": f"{_HERE}.turn_baselines:gigpo",
        GAE: f"{_HERE}.by_critic:gae",
    },
)
BY_TURN = frozenset({"turn", "gigpo", GAE})
"""Those that weigh each turn, and discount."""
WHOLE_BATCH = frozenset({"reinforce++", "reinforce++-baseline", GAE})
"""Those that compare a trajectory with the whole batch, which must be there at once."""
