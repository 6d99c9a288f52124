"""Models that a run serves beside its policy and never trains: their slots and their processes."""
