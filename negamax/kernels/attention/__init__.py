"""Causal grouped-query attention over a paged cache, preceded by norm, rope and cache write."""
