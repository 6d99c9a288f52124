"""``libra eval``: the evaluations of a recipe, on their own."""
