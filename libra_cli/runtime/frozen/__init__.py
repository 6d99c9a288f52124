"""Models that a run serves beside its policy: their servers, and the endpoint they answer at."""
