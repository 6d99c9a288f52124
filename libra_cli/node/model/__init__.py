"""The policy model: building or finding it, and computing log-probabilities and gradients."""
