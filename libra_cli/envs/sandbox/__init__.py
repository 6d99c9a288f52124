"""Sandboxes that environments open: what a model runs sees no network, no host file and no other
process."""
