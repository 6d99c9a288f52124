"""A controller that was killed is followed by another, which goes on with all that still runs."""
