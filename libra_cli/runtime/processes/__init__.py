"""Processes on hosts: their life, and the streams and HTTP by which they and this one speak."""
