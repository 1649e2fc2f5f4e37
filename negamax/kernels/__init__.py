"""Hot operations: a folder per family, each op with its PyTorch reference, and a registry."""
