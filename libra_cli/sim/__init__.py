"""A virtual-time world that drives the very machine, scheduler and planner of production."""
