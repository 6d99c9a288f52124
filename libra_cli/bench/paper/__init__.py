"""Published results of Libra and StreamRL beside those of a simulator: ``libra bench paper``."""
