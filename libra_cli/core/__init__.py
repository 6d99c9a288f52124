"""Decisions only: no clock, no randomness, no environment, no logging, no asyncio."""
