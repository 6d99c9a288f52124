"""Reads recipe files, and reports all their problems at once with their lines."""
