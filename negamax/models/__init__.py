"""Model families, a folder each: the model, written straight from top to bottom, the names of its
checkpoints and its synthetic weights.
"""
