"""Weight versions on disk and on their way between hosts."""
