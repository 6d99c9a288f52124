"""Checkpoints as files: given to the hosts that lack some, read, and made a Hugging Face model."""
