"""Writes ``report.html``, a single file that opens without a network."""
