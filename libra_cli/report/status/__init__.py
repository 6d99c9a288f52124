"""A run as one object, and that object in a terminal."""
