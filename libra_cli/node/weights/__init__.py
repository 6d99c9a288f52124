"""Weight versions: how they are written, encoded as deltas, and served between hosts."""
