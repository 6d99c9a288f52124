"""The policy model: built or found, loaded, warmed up and sampled."""
