"""Rules that say in words, from a run's own steps, that learning goes wrong."""
