"""The controller's side of the trainer and of gradient workers."""
