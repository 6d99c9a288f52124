"""The runtime half of the rollout backend vLLM."""
