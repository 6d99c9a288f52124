"""The controller's side of hosts: reaching them, and running processes on them."""
