"""The losses that ``training.loss`` can name; ``node.losses.protocol`` says what one is.

The names are here because the controller checks them, and it does not import ``node``: a loss needs
torch. To ship another loss is a new file in ``node/losses`` and a line here.
"""

from __future__ import annotations

from libra_cli.config.plugins import PluginGroup

SFT = "sft"
"""The loss of demonstrations."""
DISTILL = "distill"
"""The loss of a teacher."""
LOSSES = PluginGroup(
    "libra.losses",
    "loss",
    {
        name: f"libra_cli.node.losses.policy_gradient:{function}"
        for name, function in {
            "dapo": "dapo",
            "bnpo": "dapo",
            "grpo": "grpo",
            "dr_grpo": "dr_grpo",
            "gspo": "gspo",
            "cispo": "cispo",
            "sapo": "sapo",
            DISTILL: "dapo",
        }.items()
    }
    | {"tba": "libra_cli.node.losses.trajectory_balance:tba"}
    | {SFT: "libra_cli.node.losses.imitation:sft"},
)

_BY_ITSELF = LOSSES.shipped.keys() - {"tba"}


def keeps_reference(loss: str, kl_coef: float) -> bool:
    """Whether the first policy is kept beside the one that is trained; of a loss that does not ship
    with libra and asks for it by itself nobody here can tell."""
    return kl_coef > 0 or loss == "tba"


def compares_trajectories(loss: str) -> bool:
    """Whether a loss may compare the trajectories of a group with one another; of one that does not
    ship with libra nobody here can tell."""
    return loss not in _BY_ITSELF
