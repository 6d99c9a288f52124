"""``libra bench run`` and the regret certificate: a run played again, as it was or changed."""
