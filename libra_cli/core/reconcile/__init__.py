"""Slots that change sides: what is wanted of them, and how they get there."""
