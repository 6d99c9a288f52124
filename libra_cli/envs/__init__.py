"""Environments: the protocol, and the ones that ship with libra."""
