"""A recipe file in, a ``Recipe`` out, or every problem at once with its line."""
