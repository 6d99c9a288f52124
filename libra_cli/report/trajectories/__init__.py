"""Single trajectories, for people to read: which one, its text as a conversation, its tokens."""
