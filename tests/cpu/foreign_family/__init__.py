"""An external model family: a dense layer, then a layer with experts and sparse attention.

Sparse attention selects keys by a third cache, which has another width. Query and key norms are per
head. A family needs only such a folder and a line in `models/registry.py`.
"""
