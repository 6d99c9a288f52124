"""A run as one object, the one of ``libra status --json``: each part beside what computes it."""
