"""The page of benchmarks: figures as JSON beside those of the measurement before, and Markdown."""
