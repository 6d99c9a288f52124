"""How many GPUs each half should have, in which shapes, and whether moving there pays."""
