"""What ``core.run.observer`` keeps of a run's rows, one module for each kind of thing."""
