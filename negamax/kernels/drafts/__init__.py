"""How many draft tokens of a step are right, and what a draft model's pass reads."""
