"""The protocol of environments, and the environments that ship with libra."""
