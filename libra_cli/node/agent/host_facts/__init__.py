"""What a host tells of itself: its facts, a model's files, its network. Standard library only."""
