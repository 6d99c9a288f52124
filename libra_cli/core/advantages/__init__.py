"""How much better than expected a trajectory, or a turn of one, was: what the loss weighs it by."""
