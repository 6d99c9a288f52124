"""Losses that a recipe can name; ``protocol`` says what one is and how to add another."""
