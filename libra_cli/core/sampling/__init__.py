"""Which trajectories are worth training: dynamic sampling, overlong ones, a curriculum."""
