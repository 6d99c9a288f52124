"""What a person sees in a terminal of a run and of a plan; nothing here computes."""
