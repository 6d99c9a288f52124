"""How near the simulator is to a real server, to a real run and to what was published."""
