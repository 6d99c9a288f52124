"""Imports what a recipe names; nothing in the core does so by itself."""
