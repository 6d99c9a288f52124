"""The results of an experiment in a terminal and in ``bench.html``."""
