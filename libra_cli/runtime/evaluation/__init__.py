"""Playing evaluations beside training."""
