"""libra: agentic RL post-training on plain GPU machines."""

__version__ = "0.5.0"
