"""The processes that make sandboxes and run commands in them, of the standard library alone."""
