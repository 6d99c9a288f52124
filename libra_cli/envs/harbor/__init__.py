"""Tasks in the format of Harbor and Terminal-Bench 2, played in a sandbox without Docker."""
