"""What a user asks for: the recipe, its rules, and the reading of its file."""
