"""Building blocks of a model on one rank: linear, norms, attention, experts, weight slots."""
