"""What things cost, fitted to what was measured."""
