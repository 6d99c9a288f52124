"""Makes tasks for a terminal, in Harbor's format and by a seed: ``libra tasks make``."""
