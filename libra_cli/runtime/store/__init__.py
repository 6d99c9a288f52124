"""The run's database: one writer, many readers."""
