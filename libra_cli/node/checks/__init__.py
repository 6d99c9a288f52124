"""Short programs that try a host's torch, or read its files, before anything of it is used."""
