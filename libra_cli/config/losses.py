"""The losses that ``training.loss`` can name; ``node.losses.protocol`` says what one is.

The names are here because the controller checks them, and it does not import ``node``: a loss needs
torch. To ship another loss is a new file in ``node/losses`` and a line here.
"""

from __future__ import annotations

from libra_cli.config.plugins import PluginGroup

LOSSES = PluginGroup(
    "libra.losses",
    "loss",
    {
        "grpo": "libra_cli.node.losses.grpo:grpo",
    },
)
