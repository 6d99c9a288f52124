"""The trainer: an accelerate world that takes optimizer steps and publishes weight versions."""
