"""The experiments and checks of ``libra bench``: what is run, measured, compared and fitted."""
