"""The critic: what a turn is worth before it is taken, and the advantages that follow from it."""
