"""One module per command: each wires recipe, core and runtime together and decides nothing."""
