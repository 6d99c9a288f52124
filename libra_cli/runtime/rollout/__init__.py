"""Rollout servers, seen from the controller, whichever backend they are of."""
