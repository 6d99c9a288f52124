"""``report.html`` and ``bench.html``: single files that open without a network."""
