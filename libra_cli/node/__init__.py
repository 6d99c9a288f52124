"""The code that runs on the hosts, and the only place that may import torch, vllm, accelerate."""
