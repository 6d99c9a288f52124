"""Nonsense at every boundary: what comes of it is a LibraError or a typed failure."""
