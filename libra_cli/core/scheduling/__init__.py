"""Which server plays the next turn: estimates, policies, and the gate in front of the servers."""
