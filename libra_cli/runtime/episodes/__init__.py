"""The environments' side of trajectories: tokens in, tokens and typed outcomes out."""
