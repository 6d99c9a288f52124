"""The rollout server, which is vLLM behind a bearer token."""
