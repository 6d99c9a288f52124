"""What an experiment found, in a terminal and in ``bench.html``."""
