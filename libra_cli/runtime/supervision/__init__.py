"""Turns exceptions that nobody expected into typed failures, and logs them all."""
