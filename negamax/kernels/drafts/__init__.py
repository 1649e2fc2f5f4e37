"""How many draft tokens of a step are accepted, and what a draft model's pass reads."""
