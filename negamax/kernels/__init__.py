"""Hot operations: one folder per family, each op with its PyTorch reference, inputs, tolerance and
cost, and a registry.
"""
