"""The recipe's models and rules, and libra's exceptions."""
