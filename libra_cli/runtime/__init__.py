"""I/O on the controller; one file per kind of outside thing."""
