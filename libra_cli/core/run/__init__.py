"""The top of the core: the machine, and what only it knows."""
