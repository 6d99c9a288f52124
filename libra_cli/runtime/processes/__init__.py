"""Processes on hosts: their life, and the streams and HTTP sessions by which they are spoken to."""
