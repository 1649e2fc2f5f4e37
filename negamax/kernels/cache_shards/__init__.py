"""Attention where each rank holds some blocks of a head's KV cache."""
