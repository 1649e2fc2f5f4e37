"""Attention to selected blocks of the keys and values of earlier tokens."""
