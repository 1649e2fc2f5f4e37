"""Prepare the tokens, positions and embeddings of a step, and store its sampled tokens."""
