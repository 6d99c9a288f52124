"""The rollout server: vLLM behind a bearer token."""
