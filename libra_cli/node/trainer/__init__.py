"""The trainer: one accelerate world that takes optimizer steps and publishes weight versions."""
