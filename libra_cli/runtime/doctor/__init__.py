"""``libra doctor`` and ``libra setup``: measures hosts before a run, and prepares them for one."""
