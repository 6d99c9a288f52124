"""What becomes of exceptions that nobody expected: typed failures, a log, and never silence."""
