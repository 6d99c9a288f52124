"""Serves the HTTP interface of Tinker's SDK on the hosts of a recipe."""
