"""Measurements of libra's own claims: its speed, what its parts cost, how near its models are.

Each is a command, ``python -m tests.research.NAME``; none is part of the package or of `make test`.
"""
