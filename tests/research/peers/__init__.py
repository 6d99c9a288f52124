"""libra beside trainers that others would pick instead, on the same machine and task."""
