"""The processes of one run on one host: found by their marker, started, watched and stopped.

With what they hold: ports, logs, private and temporary files. Standard library only.
"""
