"""Monitors, which are told of a run's steps while it goes on; ``protocol`` says what one is."""
