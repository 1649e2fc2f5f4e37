"""Causal grouped-query attention over a paged cache, and the QK norm + rope + cache write in front
of it.
"""
