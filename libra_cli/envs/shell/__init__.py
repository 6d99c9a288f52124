"""Tasks in a shell: a sandbox, the tools that a model works in it with, and a check."""
