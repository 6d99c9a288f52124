"""A gradient worker: a replica of the policy that computes a share of a step for the trainer."""
