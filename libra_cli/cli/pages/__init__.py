"""``libra help``: the pages, drawn."""
