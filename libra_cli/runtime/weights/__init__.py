"""Weight versions: how they reach the hosts, and the proof that a process computes with one."""
