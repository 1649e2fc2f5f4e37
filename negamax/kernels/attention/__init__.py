"""Causal grouped-query attention over a paged cache, after norm, rope and cache write."""
