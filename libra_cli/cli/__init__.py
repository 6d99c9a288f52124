"""The ``libra`` command: the only modules that print or pick an exit code."""
