"""Hosts: getting there, and running processes on them."""
