"""Both ends of a step: prepare its tokens and positions, and store the sampled tokens."""
