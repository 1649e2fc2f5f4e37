"""Causal grouped-query attention over a paged cache, and the norm, rope and write before it."""
