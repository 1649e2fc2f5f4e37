"""Attention in which each rank stores some blocks of a head's KV cache."""
