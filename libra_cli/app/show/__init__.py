"""``libra show``."""
