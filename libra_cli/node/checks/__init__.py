"""Short programs that try a host's torch before anything is started on it."""
