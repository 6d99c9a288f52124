"""The controller's side of the rollout servers."""
