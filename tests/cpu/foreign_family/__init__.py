"""An external architecture: a dense layer, then one with experts and sparse attention.

Sparse attention selects keys by a third cache of another width. Query and key norms are per head.
This folder and a line in `models/registry.py` are all that a family adds.
"""
