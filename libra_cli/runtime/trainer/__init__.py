"""The trainer and its gradient workers, seen from the controller."""
