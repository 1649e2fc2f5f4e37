"""Ops of the forward pass, one folder per family: PyTorch references, kernels and a registry."""
