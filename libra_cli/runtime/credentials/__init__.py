"""What only the controller and the hosts of one run know: its token and its certificates."""
