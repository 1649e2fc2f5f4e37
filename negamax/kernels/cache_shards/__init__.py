"""Attention of ranks that hold some blocks of the KV cache of a head each."""
