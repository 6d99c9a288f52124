"""Weight versions over a process group of the hosts, on a network that the recipe trusts."""
