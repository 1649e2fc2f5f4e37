"""Attention to selected blocks of earlier tokens."""
