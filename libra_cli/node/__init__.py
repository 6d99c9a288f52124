"""Code that runs on the hosts; the only place torch, vllm and accelerate may be imported."""
