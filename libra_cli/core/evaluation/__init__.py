"""Evaluations: tasks that are played beside training and never trained on, and what they say."""
