"""Attention to chosen blocks of earlier tokens."""
