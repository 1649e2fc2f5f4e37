"""Ops of the forward pass, one folder per family, with references, kernels and a registry."""
