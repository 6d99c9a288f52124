"""How near the simulator is to a recorded run of a real server, and to whole runs of libra's."""
