"""Both ends of a step: which tokens it runs and where they stand, and where sampled ones go."""
