"""Which server plays the next turn: estimates, policies, and the request scheduler."""
