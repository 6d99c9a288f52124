"""The processes of a run as values: rollout servers, gradient workers, the trainer, their slots."""
