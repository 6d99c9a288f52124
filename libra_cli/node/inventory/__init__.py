"""What runs of this user own on one host, and what of it is old. Standard library only."""
