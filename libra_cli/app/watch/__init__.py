"""A run that goes on elsewhere, shown: live in a terminal, and as its report in a browser."""
