"""Conversations to imitate: read from files, rendered as those that the policy plays."""
