"""Causal grouped-query attention over a paged cache, and norm, rope and cache write before it."""
