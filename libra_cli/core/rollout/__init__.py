"""Trajectories in play, and the groups they form until the optimizer has trained on them."""
