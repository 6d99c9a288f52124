"""A recipe's servers and trainer measured where they run, and the cost profile fitted to that."""
