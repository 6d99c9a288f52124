"""A gradient worker: a whole replica that computes a share of a step beside the trainer."""
