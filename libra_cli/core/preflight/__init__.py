"""What is checked before anything starts: what hosts tell of themselves, and the rules for it."""
