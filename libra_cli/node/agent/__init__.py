"""The agent of one host, which starts, watches and stops the run's processes.

Standard library only.
"""
