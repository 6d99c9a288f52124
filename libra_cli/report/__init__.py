"""What people and scripts are shown of runs and experiments."""
